"""Shows what every layer already predicts, in the terminal and as a page."""
