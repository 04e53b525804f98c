"""Images and their classes: data sets, decoding, transforms, the cache, batches."""
