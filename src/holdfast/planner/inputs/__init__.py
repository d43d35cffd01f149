"""What a plan is asked: the question, the machine, and the traffic."""
