"""Maps and scores from any number of tokens with nothing stored: sums in one pass, its snapshots, what follows."""
