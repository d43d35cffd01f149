"""Work on requests that is done off the event loop."""
