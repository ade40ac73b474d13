"""The public checks, one pytest file per module; `kit` holds what they share."""
