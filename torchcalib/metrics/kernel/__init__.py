"""Multi-class (canonical) calibration: of the whole vector of probabilities, not of one number made of it."""
