"""Data: from files, tensors or a torch Dataset to the batches of a step.

modality    one record per kind of data, and the registry        listing/     which files, which labels
sources     what a data set is: samples by index, splits         shards/      files packed into tar
build       from a config to a data set or a reader              loading/     order, batches, worker pool, cache
inspect/    checks and statistics of files                       embedded/    data sets that come with the package
audio/ image/ video/ arrays/    from a file to a sample
"""

from bridle.data.arrays.memory import DatasetSource, TensorSource
from bridle.data.loading.loader import BadSample, Batch, Loader, sequential
from bridle.data.loading.moments import Moments, measure
from bridle.data.sources import Sample, Source, Splits

__all__ = [
    "BadSample",
    "Batch",
    "DatasetSource",
    "Loader",
    "Moments",
    "Sample",
    "Source",
    "Splits",
    "TensorSource",
    "measure",
    "sequential",
]
