"""Data: from files, tensors or a torch Dataset to the batches of a step.

sources    what a data set is: samples by index, splits         order    which sample comes when
memory     tensors and torch datasets as sources                loader   batches, normalisation, moments
folders    train, test and classes in folders of files          workers  the processes that load
image, signal, audio    files of each kind                      demo, synth    the embedded data sets
"""

from bridle.data.arrays.memory import DatasetSource, TensorSource
from bridle.data.loading.loader import BadSample, Batch, Loader, Moments, measure, sequential
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
