"""Data: from files, tensors or a torch Dataset to the batches of a step.

modality    one record per kind of data, and the registry        listing/     which files, which labels
sources     what a data set is: samples by index, splits         shards/      files packed into tar
build       from a config to a data set or a reader              loading/     order, batches, worker pool, cache
inspect/    checks and statistics of files                       embedded/    data sets that come with the package
audio/ image/ video/ arrays/    from a file to a sample
"""
