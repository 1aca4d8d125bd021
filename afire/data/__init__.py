"""From files to trusted tensors: decode, manifests, public datasets, splits, audit, pack, phantom."""
