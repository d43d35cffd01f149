"""Requests sent and answers timed, in processes of their own."""
