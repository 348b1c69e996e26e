"""Which drafts are in fast memory, how they get there, and the account of every byte."""
