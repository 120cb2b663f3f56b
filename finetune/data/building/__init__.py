"""From the rows of a source to an entry of the cache, on all cores."""
