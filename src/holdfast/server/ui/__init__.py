"""The page of a server at / and /ui, and what it shows. Nothing of a prompt or an answer is kept or told here."""
