"""What a GPU hands to the host's cores and takes back, through memory that both see."""
