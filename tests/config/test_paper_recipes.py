"""Every field of the paper's recipes: by the paper's line, by the released script, or among `OURS`.

Columns: AS-2M, AS-20K, ESC-50, ImageNet-1K, Kinetics-400. The paper prints batches per GPU; the recipes hold them over
all devices: × GPUs per node × nodes. A new config key fails here until it stands in one of the tables.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from bridle.config import Config, load_config
from bridle.data.loading.mixing import Mixed

RECIPES = ("audioset2m", "audioset20k", "esc50", "imagenet1k", "kinetics400")
Table = dict[str, dict[str, tuple[Any, ...]]]  # source: key: one value per recipe
ELSEWHERE = object()  # another table has the value of this recipe
NOT_IN_PAPER = ELSEWHERE  # "---": the paper has no such run; the recipe's value is ours

# Appendix A, row by row.
GPUS, PRETRAIN_NODES = 8, 8  # "GPU per Node", "Pretrain nnodes"
NODES = (4, 4, 1, 4, 8)  # "FT & LP nnodes"
PRETRAIN_BATCH = (16, 16, 16, 16, 32)  # "Pretrain Batch Size (B)"
BATCH = (8, 8, 8, 32, 32)  # "FT & LP Batch Size (B)"
GLOBAL_PRETRAIN = tuple(b * GPUS * PRETRAIN_NODES for b in PRETRAIN_BATCH)
GLOBAL = tuple(b * GPUS * n for b, n in zip(BATCH, NODES, strict=True))
LP = NOT_IN_PAPER

APPENDIX_A: Table = {
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
TEXT: Table = {
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
    "Algorithm 1: encoder and tokenizer in turns, a tokenizer of its own in each iteration, started once": {
        "schedule.mode": ("interleaved",) * 5,
        "schedule.tokenizer": ("renew",) * 5,
        "tokenizer.later": ("vit",) * 5,
        "quantizer.restart": (False,) * 5,
    },
    "§4.1: a simple linear projection as the cold start tokenizer": {
        "tokenizer.first": ("projection",) * 5,
        "tokenizer.whiten": (None,) * 5,
        "tokenizer.components": (None,) * 5,
        "tokenizer.standardise": ("dataset",) * 5,
        "tokenizer.item_axes": (None,) * 5,
    },
    "§3: patches to the encoder": {"encoder.whiten": (None,) * 5, "encoder.stem": (None,) * 5},
    "Eq. encoder loss: cross-entropy of the codes at all masked positions, M heads alike": {
        "loss.target": ("codes",) * 5,
        "loss.codes": ("ce",) * 5,
        "mask.predict": (1.0,) * 5,
        "encoder_phase.masks": (1,) * 5,
    },
    "App. C: soft code no, imagenet pretrained no": {"quantizer.soft": (1,) * 5, "encoder.weights": (None,) * 5},
    "App. B, §4.1: data sets and modalities": {
        "data.source": ("audio", "audio", "audio", "images", "video"),
        "data.layout": ("audioset", "audioset", "esc50", "auto", "auto"),
        "data.segments": (("balanced_train", "unbalanced_train"), ("balanced_train",), None, None, None),
    },
    "§4.2: random cropping and horizontal flipping, of video in time too; of audio neither acts": {
        "augment.enabled": (True,) * 5,
        "augment.flip": (True,) * 5,
        "augment.time_flip": (False, False, False, False, True),
    },
    "App. E: the base ViT": {"size": ("base",) * 5, "encoder.mlp_ratio": (4.0,) * 5},
    "§4.2: scores of the validation set, of all items": {
        "probe.on": ("test",) * 5,
        "probe.items": (None,) * 5,
        "finetune.items": (None,) * 5,
        "data.test_fold": (None,) * 5,  # ESC-50: "5-fold cross validation"
    },
}
# Flags of the released scripts, where the paper is silent.
RELEASED: Table = {
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
        "geometry.channels": (1, 1, 1, 3, 3),
    },
}


def all_five(**values: Any) -> dict[str, tuple[Any, ...]]:
    """The same value in every recipe; `__` stands for the dot of a key."""
    return {key.replace("__", "."): (value,) * len(RECIPES) for key, value in values.items()}


X = ELSEWHERE
# Taken from the models of the field, chosen here, or switches that are off. docs/deviations.md lists those that matter.
OURS: Table = {
    "a class token, but not in VideoMAE's ViT": {"encoder.class_token": (True, True, True, True, False)},
    "log-mel front end of AudioMAE and BEATs": {
        "audio.sample_rate": (16_000,) * 5,
        "audio.window_ms": (25.0,) * 5,
        "audio.shift_ms": (10.0,) * 5,
        "audio.low_hz": (20.0,) * 5,
    },
    "sampling and views of VideoMAE": {
        "video.stride": (4,) * 5,
        "data.views": (1, 1, 1, 1, 5),
        "video.crops": (1, 1, 1, 1, 3),
    },
    "augmentation of fine-tuning: MAE's for pictures, VideoMAE's for clips": {
        "finetune.augment.randaugment": (0, 0, 0, 2, 2),
        "finetune.augment.randaugment_magnitude": (9.0,) * 5,
        "finetune.augment.erase": (0.0, 0.0, 0.0, 0.25, 0.25),
        "finetune.label_smoothing": (0.0, 0.0, 0.0, 0.1, 0.1),
    },
    "ε of the EMA": {"quantizer.eps": (1e-5,) * 5},
    "learning rates fall to 0": {
        "encoder_phase.final_learning_rate": (0.0,) * 5,
        "tokenizer_phase.final_learning_rate": (0.0,) * 5,
        "finetune.final_learning_rate": (0.0,) * 5,
    },
    "a batch norm without weights before the probe's head": {"probe.batch_norm": (True,) * 5},
    "switches of paper=literal": all_five(
        quantizer__residual="once", quantizer__reset_every=20, loss__commitment="stages", loss__cosine="mean",
        loss__centre_teacher="position", tokenizer__position=False,
    ),
    "the encoder continues in the second iteration": all_five(schedule__encoder_restart="continue"),
    "options beyond the paper, off": all_five(
        loss__teacher_block=None, encoder__drop_path=0.0, quantizer__soft_weights="even",
        quantizer__soft_temperature=0.1, quantizer__soft_q=True, finetune__from_scratch=False,
        finetune__shots=(), finetune__draws=3, finetune__shot_steps=100,
    ),
    "pooled features of probe and fine-tuning": all_five(
        probe__pool="mean", probe__axis=0, probe__deviation=False, probe__layer=None,
        finetune__pool="mean", finetune__axis=0, finetune__deviation=False,
    ),
    "linear probes that the paper does not have: solved to the optimum": {
        "probe.head": (X, X, "logistic", X, "logistic"),
        "probe.loss": (X, X, "auto", X, "auto"),
        "probe.learning_rate": (X, X, None, X, None),
        "probe.epochs": (X, X, 50, X, 50),
        "probe.batch": (X, X, 256, X, 256),
        "probe.weight_decay": (X, X, 1e-4, X, 0.01),
        "probe.betas": (X, X, (0.9, 0.95), X, (0.9, 0.999)),
        "probe.sampling": (X, X, "even", X, "even"),
        "probe.epoch_items": (X, X, None, X, None),
    },
    "what else a probe does": all_five(
        probe__enabled=True, probe__training_items=20_000, probe__warmup_epochs=0.0, probe__classical=False,
        probe__shots=(), probe__draws=10, probe__scorers=(), probe__cache_mb=2048,
    ),
    "sizes of crops": {
        "augment.crop_scale": ((0.2, 1.0), (0.2, 1.0), (0.2, 1.0), (0.2, 1.0), (0.5, 1.0)),
        "finetune.augment.crop_scale": ((0.2, 1.0), (0.2, 1.0), (0.2, 1.0), (0.2, 1.0), (0.5, 1.0)),
    },
    "a roll in time, which did not act in the released code": {
        "augment.roll": (False,) * 5,
        "finetune.augment.roll": (True, True, True, False, False),
    },
    "further augmentation, off in pretraining": all_five(
        augment__randaugment=0, augment__randaugment_magnitude=9.0, augment__erase=0.0, augment__gain_db=0.0,
        augment__noise_db=None, augment__time_mask=0, augment__band_mask=0, augment__mixup=0.0, augment__cutmix=0.0,
        augment__mix_probability=1.0, augment__mix_space="features",
    ),
    "further augmentation, as by default in fine-tuning": all_five(
        finetune__augment__enabled=True, finetune__augment__flip=True, finetune__augment__time_flip=False,
        finetune__augment__gain_db=0.0, finetune__augment__noise_db=None,
    ),
    "widths of hidden layers and windows": all_five(
        decoder__mlp_ratio=4.0, decoder__window="auto", estimator__mlp_ratio=4.0
    ),
    "lengths given in epochs, not in steps; batches whole": {
        f"{phase}.{key}": (None,) * 5
        for phase in ("encoder_phase", "tokenizer_phase", "finetune")
        for key in ("steps", "warmup_steps", "micro_batch")
    } | {"max_steps": (None,) * 5},
    "where data and names are from": {"name": RECIPES} | all_five(
        data__root=None, data__manifest=None, data__columns=None, signals__sample_rate=None, seed=0, log="auto",
    ),
    "how data is read": all_five(
        data__trim=False, data__cache_mb=0, data__workers=8, data__bad_share=0.1, video__timeout=60.0
    ),
    "how a run is executed": all_five(
        runtime__device="auto", runtime__precision="auto", runtime__threads=0, runtime__deterministic=False,
        runtime__checkpoint_activations=False, runtime__checkpoint_every=1000, runtime__keep=2,
        runtime__keep_finished=False, runtime__log_every=20, runtime__stop_after_skips=5, runtime__timeout_minutes=30.0,
        runtime__compare_every=100, runtime__shard="none", runtime__shard_groups=1, runtime__compile=False,
    ),
    "the detokenizer, which the paper does not have": all_five(
        detokenizer__steps=600, detokenizer__epochs=None, detokenizer__warmup_steps=60, detokenizer__warmup_epochs=None,
        detokenizer__batch=32, detokenizer__micro_batch=None, detokenizer__learning_rate=1e-3,
        detokenizer__final_learning_rate=0.0, detokenizer__weight_decay=0.01, detokenizer__betas=(0.9, 0.95),
        detokenizer__clip=None, detokenizer__width=None, detokenizer__depth=2, detokenizer__heads=None,
        detokenizer__items=256,
    ),
}  # fmt: skip


def value_of(config: Config, key: str) -> Any:
    return reduce(lambda part, name: None if part is None else getattr(part, name), key.split("."), config)


def keys_of(section: BaseModel, above: str = "") -> set[str]:
    """The dotted keys of all values; a section that is None has none."""
    found: set[str] = set()
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= keys_of(value, f"{above}{name}.")
        elif f"{above}{name}" != "finetune.mask":  # None in the recipe of clips: no kind and no ratio
            found.add(f"{above}{name}")
    return found


ROWS = [(f"{line}: {key}", key, row) for table in (APPENDIX_A, TEXT, RELEASED, OURS) for line, keys in table.items()
        for key, row in keys.items()]  # fmt: skip


@pytest.mark.parametrize(("key", "row"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_recipes_hold_what_the_paper_says(key: str, row: tuple[Any, ...]) -> None:
    wanted = {name: value for name, value in zip(RECIPES, row, strict=True) if value is not ELSEWHERE}
    found = {name: value_of(load_config(name), key) for name in wanted}
    assert found == {name: pytest.approx(value) if key == "data.std" else value for name, value in wanted.items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_field_of_a_recipe_stands_in_one_table(recipe: str) -> None:
    column = RECIPES.index(recipe)
    told = [key for _, key, row in ROWS if row[column] is not ELSEWHERE]
    assert len(told) == len(set(told))  # once
    assert keys_of(load_config(recipe)) - {"summary"} <= set(told)


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
