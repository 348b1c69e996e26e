"""Making a draft from a target: the target's own text, then a small model trained on it."""
