"""Anomaly detection from normal films only: scores, choice, calibration, and the detector that carries them."""
