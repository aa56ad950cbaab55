"""Weight files of a model folder: paths, sizes and fingerprints, checked without loading the model."""
