"""The servers of this machine: who runs, and starting one in the background."""
