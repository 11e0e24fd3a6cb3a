"""One layer of a network at a time: its runs, its rounding, and the verdict on it."""
