"""From samples to the batches of a step: order, worker processes, cache, augmentation."""
