"""What a representation is worth: features, probe, fine-tuning, segmentation, and comparing their results."""
