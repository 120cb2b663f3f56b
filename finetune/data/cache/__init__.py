"""The cache of tokenised examples: what lies on the disk, found by what it was made of."""
