"""One draft-and-verify iteration: proposals, verification, acceptance, and the answer's text."""
