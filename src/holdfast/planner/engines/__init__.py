"""Commands and settings of the engines that plans are made for."""
