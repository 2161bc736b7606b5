"""Every hyper-parameter of the paper's recipes, beside the line of the paper or the released script that it is from.

Columns: AS-2M, AS-20K, ESC-50, ImageNet-1K, Kinetics-400. The paper prints batches per GPU; the recipes hold them over
all devices: × GPUs per node × nodes.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch

from bridle.config import Config, load_config
from bridle.data.loading.mixing import Mixed

RECIPES = ("audioset2m", "audioset20k", "esc50", "imagenet1k", "kinetics400")
NOT_IN_PAPER = object()  # "---": the paper has no such run

# Appendix A, row by row.
GPUS, PRETRAIN_NODES = 8, 8  # "GPU per Node", "Pretrain nnodes"
NODES = (4, 4, 1, 4, 8)  # "FT & LP nnodes"
PRETRAIN_BATCH = (16, 16, 16, 16, 32)  # "Pretrain Batch Size (B)"
BATCH = (8, 8, 8, 32, 32)  # "FT & LP Batch Size (B)"
GLOBAL_PRETRAIN = tuple(b * GPUS * PRETRAIN_NODES for b in PRETRAIN_BATCH)
GLOBAL = tuple(b * GPUS * n for b, n in zip(BATCH, NODES, strict=True))
LP = NOT_IN_PAPER

APPENDIX_A: dict[str, dict[str, tuple[Any, ...]]] = {
    "Pretrain Batch Size": {
        "encoder_phase.batch": GLOBAL_PRETRAIN,
        "tokenizer_phase.batch": GLOBAL_PRETRAIN,
    },
    "FT & LP Batch Size": {
        "finetune.batch": GLOBAL,
        "probe.batch": (256, 256, LP, 1024, LP),
    },
    "Encoder Pretrain LR": {"encoder_phase.learning_rate": (5e-4, 5e-4, 5e-4, 5e-4, 1.2e-3)},
    "Tokenizer Pretrain LR": {"tokenizer_phase.learning_rate": (2e-4, 2e-4, 2e-4, 2e-4, 2.5e-4)},
    "FT LR": {"finetune.learning_rate": (5e-4, 4e-4, 2e-3, 5e-4, 7.5e-4)},
    "LP LR": {"probe.learning_rate": (4e-3, 4e-2, LP, 2e-3, LP)},
    "Encoder Pretrain Epochs": {"encoder_phase.epochs": (130, 130, 130, 400, 800)},
    "Tokenizer Pretrain Epochs": {"tokenizer_phase.epochs": (30, 30, 30, 100, 200)},
    "FT Epochs": {"finetune.epochs": (120, 150, 300, 200, 75)},
    "LP Epochs": {"probe.epochs": (250, 400, LP, 300, LP)},
    "Pretrain Mask Ratio": {
        "mask.ratio": (0.8, 0.8, 0.8, 0.8, 0.9),
        "mask.kind": ("random", "random", "random", "random", "tube"),  # §4.2: tube masking of video
    },
    "FT Masking": {
        "finetune.mask.kind": ("axes", "axes", "axes", "random", None),
        "finetune.mask.ratio": ((0.2, 0.2), (0.2, 0.2), (0.2, 0.2), 0.2, None),
    },
    "Optimizer": {"probe.head": ("adamw", "adamw", LP, "adamw", LP)},  # AdamW everywhere; phases have no other
    "Weight Decay": {
        "encoder_phase.weight_decay": (1e-4,) * 5,
        "tokenizer_phase.weight_decay": (1e-4,) * 5,
        "finetune.weight_decay": (1e-4,) * 5,
        "probe.weight_decay": (1e-4, 1e-4, LP, 1e-4, LP),
    },
    "FT Loss": {"finetune.loss": ("bce", "bce", "bce", "bce", "ce")},
    "LP Loss": {"probe.loss": ("bce", "bce", LP, "bce", LP)},
    "Normalization Mean": {
        "data.mean": ((-4.4446096,), (-4.4446096,), (-6.6268077,), (0.485, 0.456, 0.406), (0.485, 0.456, 0.406))
    },
    "Normalization Std": {  # of audio the field divides by 2·std
        "data.std": ((2 * 3.3216383,), (2 * 3.3216383,), (2 * 5.358466,), (0.229, 0.224, 0.225), (0.229, 0.224, 0.225))
    },
    "Codebook Num (M), RQ": {"quantizer.codebooks": (4,) * 5},
    "Codebook Size (K_m), RQ": {"quantizer.codes": (256,) * 5},
    "Codebook Dim (D)": {"quantizer.width": (256,) * 5},
    "EMA Decay Rate": {"quantizer.decay": (0.99,) * 5},
    "Code Reset Threshold (T_u)": {"quantizer.reset_below": (1,) * 5},
}
# Sections 3 to 4 and appendix E.
TEXT: dict[str, dict[str, tuple[Any, ...]]] = {
    "Algorithm 1: R = 2": {"schedule.iterations": (2,) * 5},
    "App. E: k-means initialization of 10 steps": {
        "quantizer.start": ("kmeans",) * 5,
        "quantizer.kmeans_iterations": (10,) * 5,
    },
    "§3.3: EMA update": {"quantizer.update": ("ema",) * 5},
    "§4.1, App. E: base ViT, 768-dimensional features": {
        "encoder.width": (768,) * 5,
        "encoder.depth": (12,) * 5,
        "encoder.heads": (12,) * 5,
    },
    "App. E: decoder 16-block Swin, 4-block transformer for video": {
        "decoder.kind": ("window", "window", "window", "window", "plain"),
        "decoder.depth": (16, 16, 16, 16, 4),
    },
    "App. E: estimator 3-block, 4-block for video": {"estimator.depth": (3, 3, 3, 3, 4)},
    "§5: α = 0.5, tokenizer every 5 steps": {"schedule.joint_weight": (0.5,) * 5, "schedule.joint_every": (5,) * 5},
    "App. B: frames 512 x 288": {"video.short_side": (None, None, None, None, 288)},
}
# Flags of the released scripts, where the paper is silent.
RELEASED: dict[str, dict[str, tuple[Any, ...]]] = {
    "warm-up epochs": {
        "encoder_phase.warmup_epochs": (10, 10, 10, 10, 40),
        "tokenizer_phase.warmup_epochs": (2,) * 5,
        "finetune.warmup_epochs": (10, 10, 20, 5, 5),
    },
    "betas of pretraining": {
        "encoder_phase.betas": ((0.9, 0.95),) * 5,
        "tokenizer_phase.betas": ((0.9, 0.95),) * 5,
    },
    "betas of fine-tuning: AdamW's default": {"finetune.betas": ((0.9, 0.999),) * 5},
    "betas of the evaluation script": {"probe.betas": ((0.9, 0.95), (0.9, 0.95), LP, (0.9, 0.95), LP)},
    "no clipping": {
        "encoder_phase.clip": (None,) * 5,
        "tokenizer_phase.clip": (None,) * 5,
        "finetune.clip": (None,) * 5,
    },
    "weight of the cosine and commitment losses": {
        "loss.cosine_weight": (1.0,) * 5,
        "loss.commitment_weight": (0.25,) * 5,
    },
    "epoch_len of the weighted sampler": {
        "finetune.sampling": ("balanced", "even", "even", "even", "even"),
        "finetune.epoch_items": (200_000, None, None, None, None),
        "probe.sampling": ("balanced", "even", LP, "even", LP),
        "probe.epoch_items": (200_000, None, LP, None, LP),
    },
    "mixup with probability 0.5, shares from Beta(10, 10); of images built and never called": {
        "finetune.augment.mixup": (10.0, 10.0, 10.0, 0.0, 0.8),
        "finetune.augment.mix_probability": (0.5, 0.5, 0.5, 1.0, 1.0),
        "finetune.augment.mix_space": ("waveform", "waveform", "waveform", "features", "features"),
        "finetune.augment.cutmix": (0.0, 0.0, 0.0, 0.0, 1.0),
    },
    "gain Beta(10, 10) + 0.5": {
        "augment.gain_beta": (10.0, 10.0, 10.0, 0.0, 0.0),
        "finetune.augment.gain_beta": (10.0, 10.0, 10.0, 0.0, 0.0),
    },
    "SpecAugment --freqm 48 --timem 192": {
        "finetune.augment.band_mask": (48, 48, 48, 0, 0),
        "finetune.augment.time_mask": (192, 192, 192, 0, 0),
    },
    "decoder 512 wide, 16 heads": {"decoder.width": (512,) * 5, "decoder.heads": (16,) * 5},
    "estimator 768 wide, 12 heads": {"estimator.width": (768,) * 5, "estimator.heads": (12,) * 5},
    "layer decay and drop-path of fine-tuning": {
        "finetune.layer_decay": (0.75,) * 5,
        "finetune.drop_path": (0.1,) * 5,
    },
    "input sizes": {
        "geometry.input": ((1024, 128), (1024, 128), (512, 128), (224, 224), (16, 224, 224)),
        "geometry.patch": ((16, 16), (16, 16), (16, 16), (16, 16), (2, 16, 16)),
    },
}


def value_of(config: Config, key: str) -> Any:
    return reduce(lambda part, name: None if part is None else getattr(part, name), key.split("."), config)


ROWS = [(f"{line}: {key}", key, row) for table in (APPENDIX_A, TEXT, RELEASED) for line, keys in table.items()
        for key, row in keys.items()]  # fmt: skip


@pytest.mark.parametrize(("key", "row"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_recipes_hold_what_the_paper_says(key: str, row: tuple[Any, ...]) -> None:
    wanted = {name: value for name, value in zip(RECIPES, row, strict=True) if value is not NOT_IN_PAPER}
    found = {name: value_of(load_config(name), key) for name in wanted}
    assert found == {name: pytest.approx(value) if key == "data.std" else value for name, value in wanted.items()}


def test_the_vq_baseline_has_as_many_codes_in_one_book() -> None:
    for name in RECIPES:  # "Codebook Num (M), VQ" 1, "Codebook Size (K_m), VQ" 1024
        assert load_config(name, ["quantizer=vq"]).quantizer.sizes == (1024,)


def test_an_epoch_of_audioset_fine_tuning_is_200_000_draws() -> None:
    settings = load_config("audioset2m").finetune
    assert settings.step_count(1_738_788 + 18_685) == 120 * 200_000 // 256  # the paper's two training segments
    assert settings.warmup_count(1_757_473) == round(10 * 200_000 / 256)
    assert load_config("audioset20k").finetune.step_count(18_685) == round(150 * 18_685 / 256)


class Two:
    classes, labels = ("a", "b"), [0, 1]

    def __len__(self) -> int:
        return 2


def test_half_of_the_audio_is_mixed_by_shares_around_a_half() -> None:
    mixed, source = Mixed(Two(), load_config("audioset2m").finetune.augment), torch.Generator().manual_seed(0)  # type: ignore[arg-type]
    plans = [mixed._plan(source) for _ in range(2000)]
    shares = torch.tensor([plan.share for plan in plans if plan is not None])
    assert abs(len(shares) / 2000 - 0.5) < 0.04
    assert abs(float(shares.std()) - 0.109) < 0.01  # of Beta(10, 10); of Beta(0.5, 0.5) it is 0.354
