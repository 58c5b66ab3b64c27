"""Vision-language models: the tower is shared out over the ranks, and all results equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist

import longspan
from longspan.core.layout import split_by_cost
from longspan.hf.model.vision import PIXEL_KEYS
from tests.choose import confirming
from tests.hf.pictures import (
    FAMILIES,
    GRIDS,
    IMAGE,
    IMAGES,
    ROWS,
    SQUARE_ROWS,
    TILES,
    Rows,
    batch,
    build,
    rows_for,
    truth_about,
)
from tests.models import Truth, check_gradients, check_loss, compare, gradients, meshes, sharding, truth_of
from tests.pool import RankPool, on_ranks


def _run(family: str, ring: int, fsdp: bool, rows: Rows, side: str, truth: Truth) -> None:
    sp = sharding(ring=ring)
    compare(truth, longspan.parallelize(build(family), sp, fsdp=fsdp), batch(family, rows, side=side), sp)


# A ring's layout is zigzag: every rank has two runs. Padding is on the left or right.
EVERY = [(family, ring, side) for family in FAMILIES for ring in (1, 2) for side in ("left", "right")]
ON_MORE_RANKS = ("Qwen3VL", *list(FAMILIES)[::3])  # in test_4_ranks and test_some_meshes
CHOSEN = [(f, 1 + i % 2, ("left", "right")[i // 2 % 2]) for i, f in enumerate(FAMILIES) if f not in ON_MORE_RANKS]


@pytest.mark.parametrize(
    ("family", "ring", "side"), [*CHOSEN, *confirming(case for case in EVERY if case not in CHOSEN)]
)
def test_one_process(pool2: RankPool, family: str, ring: int, side: str) -> None:
    rows, fsdp = rows_for(family), (list(FAMILIES).index(family) // 2) % 2 == 0
    pool2.run(_run, family, ring, fsdp, rows, side, truth_about(family, rows, side))


@pytest.mark.parametrize("family", ["Glm4v", *confirming(f for f in GRIDS if f != "Glm4v")])
def test_images_only(pool2: RankPool, family: str) -> None:
    pool2.run(_run, family, 1, True, IMAGES, "left", truth_about(family, IMAGES))


SMALL: Rows = ((5, ("image", 1, 4, 4), 3, ("image", 1, 2, 2)),)


def test_images_of_one_embedding(pool2: RankPool) -> None:
    """One rank's share is a single embedding, for which transformers' Mistral-3 fails."""
    pool2.run(_run, "Mistral3", 1, True, SMALL, "left", truth_about("Mistral3", SMALL))


ONE_IMAGE: Rows = ((5, ("image", 1, 4, 4), 12),)
NONE: Rows = ((9,), (6,))


ON_4 = ((4, True, ONE_IMAGE), (2, False, ONE_IMAGE), (1, True, NONE))


def _on_4(family: str, truths: list[Truth]) -> None:
    # With a ring of 4 some ranks have padding alone; of one image three ranks encode nothing, and hold no placeholder.
    for (ring, fsdp, rows), truth in zip(ON_4, truths, strict=True):
        sp = sharding(ring=ring)
        compare(truth, longspan.parallelize(build(family), sp, fsdp=fsdp), batch(family, rows), sp)


def test_every_tower_casts_its_pixels() -> None:
    """Pixels of a batch on the host are hidden from FSDP, which would cast them to the compute dtype."""
    for family in FAMILIES:
        pictures = batch(family, rows_for(family))
        assert any(x.dtype == torch.float32 for key, x in pictures.items() if key in PIXEL_KEYS)
        assert build(family).to(torch.bfloat16)(**pictures).loss.isfinite()


@pytest.mark.parametrize("family", ["Qwen3VL", *confirming(f for f in FAMILIES if f != "Qwen3VL")])
def test_4_ranks(pool4: RankPool, family: str) -> None:
    pool4.run(_on_4, family, [truth_about(family, rows) for *_, rows in ON_4], timeout=60)


def _replicas(family: str, truth: Truth) -> None:
    """The second replica's rows have no video."""
    for fsdp in (True, False):
        sp = sharding(data=2)
        mine = batch(family, MIXED, keep=(2 * sp.data_rank, 2 * sp.data_rank + 1))
        assert ("pixel_values_videos" in mine) == (sp.data_rank == 0)
        compare(truth, longspan.parallelize(build(family), sp, fsdp=fsdp), {}, sp, mine)


MIXED: Rows = (*ROWS, ROWS[1])


@pytest.mark.parametrize("family", ["Qwen2_5_VL", *confirming(["Qwen3VL"])])
def test_replicas_with_other_pictures(pool4: RankPool, family: str) -> None:
    pool4.run(_replicas, family, truth_about(family, MIXED))


def _only_tower_trained(family: str) -> Any:
    model = build(family)
    model.model.language_model.requires_grad_(False)
    model.lm_head.requires_grad_(False)
    return model


def _frozen_text(truth: Truth) -> None:
    """Without pictures, the second replica's loss has a backward through the tower alone."""
    sp, memory = sharding(data=2), longspan.Memory(checkpointing="selective")
    for fsdp in (False, True):
        mine = batch("Qwen3VL", ((5, ("image", 1, 4, 4), 4), (9,)), keep=(sp.data_rank,))
        model = longspan.parallelize(_only_tower_trained("Qwen3VL"), sp, fsdp=fsdp, memory=memory)
        compare(truth, model, {}, sp, mine)


def test_only_the_tower_is_trained(pool2: RankPool) -> None:
    whole = batch("Qwen3VL", ((5, ("image", 1, 4, 4), 4), (9,)))
    pool2.run(_frozen_text, truth_of(_only_tower_trained("Qwen3VL"), whole))


def _on_meshes(cases: list[tuple[str, tuple[int, int, str], Truth]]) -> None:
    for number, (family, (data, ring, layout), truth) in enumerate(cases):
        sp, rows = sharding(data, ring, layout), _four_rows(family)
        here, n = sp.data_rank, len(rows) // data
        mine = batch(family, rows, keep=range(here * n, (here + 1) * n))
        model = longspan.parallelize(build(family), sp, fsdp=number % 2 == 0)
        try:
            compare(truth, model, {}, sp, mine)
        except AssertionError as error:
            raise AssertionError(f"{family}, data={data}, ring={ring}, {layout}: {error}") from error


def _four_rows(family: str) -> Rows:
    return (*rows_for(family), (12,))[:4]


def check_every_mesh(get_pool: Callable[[int], RankPool], ranks: int, family: str) -> None:
    """Assert that a family equals one process on every mesh of so many ranks."""
    truth = truth_about(family, _four_rows(family))
    get_pool(ranks).run(_on_meshes, [(family, mesh, truth) for mesh in meshes(ranks)], timeout=600)


@pytest.mark.parametrize(("ranks", "family"), confirming((ranks, family) for ranks in (2, 4, 8) for family in FAMILIES))
def test_every_mesh(get_pool: Callable[[int], RankPool], ranks: int, family: str) -> None:
    check_every_mesh(get_pool, ranks, family)


@pytest.mark.parametrize(("ranks", "every"), [(4, 6), *confirming([(4, 3), (8, 6)])])
def test_some_meshes(get_pool: Callable[[int], RankPool], ranks: int, every: int) -> None:
    """Every sixth or third family, on one of the meshes in turn."""
    families, of = list(FAMILIES)[::every], meshes(ranks)
    cases = [(x, of[(3 * i + 1) % len(of)], truth_about(x, _four_rows(x))) for i, x in enumerate(families)]
    get_pool(ranks).run(_on_meshes, cases, timeout=120)


# ---------------------------------------------------------------------------------------------------------------------
# Options of training.


def _with_memory_options(family: str, truth: Truth) -> None:
    sp = sharding(ring=2)
    model = longspan.parallelize(build(family), sp, memory="longest").train()
    recomputed = 0

    def count(*_: Any) -> None:
        nonlocal recomputed
        recomputed += torch.is_grad_enabled()

    model.model.visual.blocks[0].norm1.register_forward_hook(count)
    compare(truth, model, batch(family), sp)
    assert recomputed == 4  # images and video, each in the forward and in the backward


@pytest.mark.parametrize("family", ["Qwen3VL", *confirming(["Qwen2_5_VL", "Qwen3VLMoe"])])
def test_memory_options(pool2: RankPool, family: str) -> None:
    pool2.run(_with_memory_options, family, truth_about(family, ROWS))


def _frozen(family: str) -> Any:
    model = build(family)
    model.model.visual.requires_grad_(False)
    return model


def _with_frozen_tower(family: str, truth: Truth) -> None:
    for fsdp in (True, False):
        sp = sharding()
        model = longspan.parallelize(_frozen(family), sp, fsdp=fsdp)
        made = []
        model.model.visual.register_forward_hook(lambda _, args, out, made=made: made.append(out.pooler_output))
        compare(truth, model, batch(family), sp)
        assert made and not any(x.requires_grad for x in made)


def test_frozen_tower(pool2: RankPool) -> None:
    pool2.run(_with_frozen_tower, "Qwen2_5_VL", truth_of(_frozen("Qwen2_5_VL"), batch("Qwen2_5_VL")))


def _adapted(layers: list[str]) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(
        build("Qwen2_5_VL"), peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    )


def _with_lora(layers: list[str], truth: Truth) -> None:
    model = longspan.parallelize(_adapted(layers), sharding())
    out = model(**batch("Qwen2_5_VL"))
    out.loss.backward()
    check_loss(float(out.loss.detach()), truth)
    check_gradients(gradients(model), truth)


@pytest.mark.parametrize("layers", [["q_proj", "qkv"], *confirming([["q_proj", "o_proj"]])], ids=["both", "language"])
def test_lora(pool2: RankPool, layers: list[str]) -> None:
    pool2.run(_with_lora, layers, truth_of(_adapted(layers), batch("Qwen2_5_VL")))


def _frozen_text_model() -> Any:
    model = build("Llava")
    model.model.language_model.requires_grad_(False)
    return model


def _head_of_frozen_text_model(expected: torch.Tensor) -> None:
    """Without pictures, nothing in front of the head has a gradient."""
    model = longspan.parallelize(_frozen_text_model(), sharding())
    (dist.get_world_size() * longspan.token_logprobs(model, batch("Llava", ((19,),))).square().sum()).backward()
    torch.testing.assert_close(gradients(model)["lm_head.weight"], expected, rtol=1e-4, atol=1e-4)


def test_log_probabilities_train_a_head_alone(pool2: RankPool) -> None:
    model, whole = _frozen_text_model(), batch("Llava", ((19,),))
    rows = model(input_ids=whole["input_ids"]).logits[:, :-1].log_softmax(-1)
    rows.gather(2, whole["labels"][:, 1:, None]).square().sum().backward()
    pool2.run(_head_of_frozen_text_model, model.lm_head.weight.grad)


def _logprobs(expected: torch.Tensor) -> None:
    model = longspan.parallelize(build("Qwen2_5_VL"), sharding(ring=2))
    found = longspan.token_logprobs(model, batch("Qwen2_5_VL"), gather=True).detach()[:, :-1]
    labels = batch("Qwen2_5_VL")["labels"][:, 1:]
    torch.testing.assert_close(found[labels != -100], expected, rtol=1e-4, atol=1e-5)


def test_log_probabilities(pool2: RankPool) -> None:
    labels = batch("Qwen2_5_VL")["labels"][:, 1:]
    rows = truth_about("Qwen2_5_VL", ROWS).exact.logits[:, :-1].log_softmax(-1)
    expected = rows.gather(2, labels.clamp_min(0)[..., None])[..., 0][labels != -100].float()
    pool2.run(_logprobs, expected)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused.


@on_ranks(2)
def test_refusals() -> None:
    model, whole = longspan.parallelize(build("Qwen2_5_VL"), sharding()), batch("Qwen2_5_VL")
    other = dict(whole)

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(longspan.LongspanError, match=match):
            model(**{**whole, **changes})

    ids = whole["input_ids"].clone()
    ids[ids == IMAGE] = torch.tensor([IMAGE] * 14 + [5])
    refused(r"has 14 image placeholders \(id 57\), `pixel_values` gives 15 embeddings", input_ids=ids)
    refused(
        r"`pixel_values` holds 59 patches, the 3 grids of `image_grid_thw` 60", pixel_values=whole["pixel_values"][1:]
    )
    refused(r"frames of 4 x 5 patches for image 0; the model merges 2 x 2", image_grid_thw=torch.tensor([[1, 4, 5]]))
    refused(r"`pixel_values` with `inputs_embeds`", input_ids=None, inputs_embeds=torch.zeros(3, 32, 32))
    refused(r"`mm_encoder_outputs` would be embeddings of all ranks' pictures", mm_encoder_outputs={"image": 1})
    refused(
        "`pixel_values` holds no image", pixel_values=whole["pixel_values"][:0], image_grid_thw=torch.zeros(0, 3).int()
    )
    refused("`vision_feature_layer` is read from the model's config", vision_feature_layer=1)
    with pytest.raises(longspan.LongspanError, match=r"`pixel_values` cannot be cut: "):
        longspan.shard_batch(whole, sharding())
    llava = longspan.parallelize(build("Llava"), sharding(), fsdp=False)
    with pytest.raises(longspan.LongspanError, match=r"takes no `pixel_values_videos`, only pixel_values; leave it"):
        llava(**batch("Llava", ((9,),)), pixel_values_videos=torch.zeros(1, 2, 3, 16, 16))
    small = batch("Mistral3", SMALL)
    small["image_sizes"][1] = torch.tensor([4, 16])
    with pytest.raises(longspan.LongspanError, match=r"image 1 of `pixel_values` is too small for the vision tower"):
        longspan.parallelize(build("Mistral3"), sharding(), fsdp=False)(**small)
    tensor = longspan.SequenceSharding(longspan.init_mesh(tensor=2))
    with pytest.raises(longspan.LongspanError, match=r"has a vision tower, which is not sharded over `tensor=2`"):
        longspan.parallelize(build("Qwen2_5_VL"), tensor)
    # A rank with another image: other pixels, and another shape with as many patches.
    if sharding().rank:
        other["pixel_values"] = other["pixel_values"] + 1
    with pytest.raises(
        longspan.LongspanError, match=r"ranks 1 were given another one than ranks 0 .same shapes, other"
    ):
        model(**other)
    if sharding().rank:
        other["image_grid_thw"] = torch.tensor([[1, 6, 4], [1, 8, 4], [1, 2, 2]])
    with pytest.raises(longspan.LongspanError, match=r"ranks 1 were given another one than ranks 0"):
        model(**other)


@pytest.mark.parametrize("fsdp", [True, False])
@on_ranks(2)
def test_placeholders_without_pixels(fsdp: bool) -> None:
    """They are refused; a replica without pictures runs beside one that has some."""
    sp = sharding(data=2)
    whole = batch("Qwen2_5_VL", IMAGES)
    text = {key: x for key, x in whole.items() if key not in ("pixel_values", "image_grid_thw")}
    with pytest.raises(longspan.LongspanError, match=r"image placeholders .id 57., and no `pixel_values` fills them"):
        longspan.parallelize(build("Qwen2_5_VL"), sp, fsdp=fsdp)(**text)
    text["input_ids"] = text["input_ids"].masked_fill(whole["input_ids"] == IMAGE, 5)
    text["mm_token_type_ids"] = torch.zeros_like(text["mm_token_type_ids"])
    replicas = [whole, text]
    count = 2 * (whole["labels"][:, 1:] != -100).sum()
    plain, model = build("Qwen2_5_VL"), longspan.parallelize(build("Qwen2_5_VL"), sp, fsdp=fsdp)
    losses = [plain(**each, num_items_in_batch=count).loss for each in replicas]
    torch.stack(losses).sum().backward()
    loss = model(**replicas[sp.data_rank]).loss
    loss.backward()
    torch.testing.assert_close(loss, sum(losses), rtol=1e-5, atol=1e-6)
    expected = gradients(plain)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(2)
def test_cached_tokens_behind_pictures() -> None:
    """Positions behind pictures are not the number of tokens."""
    model = longspan.parallelize(build("Qwen2_5_VL"), sharding(), fsdp=False).eval()
    cache, whole = longspan.ShardedCache(model), batch("Qwen2_5_VL", ROWS[:1])
    del whole["labels"]
    following = torch.tensor([[7]])
    positions = whole["input_ids"].shape[1] + build("Qwen2_5_VL").model.get_rope_index(**whole)[1]
    with torch.no_grad():
        expected = build("Qwen2_5_VL").eval()(**_with(whole, following)).logits[:, -1:]
        model(**whole, past_key_values=cache)
        with pytest.raises(longspan.LongspanError, match="give the `position_ids` of tokens that follow 32"):
            model(following, past_key_values=cache)
        found = model(following, past_key_values=cache, position_ids=positions).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _with(whole: dict[str, Any], following: torch.Tensor) -> dict[str, Any]:
    ends = {"input_ids": following, "mm_token_type_ids": torch.zeros_like(following)}
    return {key: torch.cat([x, ends[key]], 1) if key in ends else x for key, x in whole.items()}


def _packed(family: str) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Return two documents with images in one row, their positions `[4, 1, n]`, and the number of each token's."""
    documents = [batch(family, (row,)) for row in (ROWS[2], (3, ("image", 1, 4, 4), 6))]
    dims = {key: 0 if key in ("pixel_values", "image_grid_thw") else 1 for key in documents[0]}
    whole = {key: torch.cat([each[key] for each in documents], dim) for key, dim in dims.items()}
    lengths = [each["input_ids"].shape[1] for each in documents]
    whole["labels"][:, lengths[0]] = -100
    axes = [build(family).model.get_rope_index(**each)[0] for each in documents]
    positions = torch.cat([torch.cat([torch.arange(x.shape[2]).view(1, 1, -1), x]) for x in axes], 2)
    return whole, positions, torch.arange(2).repeat_interleave(torch.tensor(lengths))[None]


def _on_packed(family: str, truth: Truth) -> None:
    whole, positions, ids = _packed(family)
    for ring, marks in ((1, {"position_ids": positions}), (2, {"document_ids": ids})):
        sp = sharding(ring=ring)
        compare(truth, longspan.parallelize(build(family), sp), whole | marks, sp)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", *confirming(["Qwen3VL"])])
def test_packed_documents(pool2: RankPool, family: str) -> None:
    """Rotary positions are relative, so they may count on through a row whose documents are marked by ids."""
    whole, positions, _ = _packed(family)
    pool2.run(_on_packed, family, truth_of(build(family), whole | {"position_ids": positions}))


def _adjacent_images() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return two documents as rows, the same packed in one row, and their lengths: one ends, one begins with an image.

    In the packed row the images are one run of placeholders, and must not see each other.
    """
    g, image = torch.Generator().manual_seed(3), [IMAGE] * 16
    text = [torch.randint(3, IMAGE, (size,), generator=g).tolist() for size in (4, 7)]
    rows = [torch.tensor(text[0] + image), torch.tensor(image + text[1])]
    lengths = torch.tensor([len(row) for row in rows])
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16, generator=g)}

    def described(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        is_text = (ids != IMAGE) & (ids != 0)
        labels = torch.where(is_text, ids, -100)
        return {"input_ids": ids, "token_type_ids": (ids == IMAGE).long(), "labels": labels, **pixels}

    padded = described(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    padded["attention_mask"] = (padded["input_ids"] != 0).long()
    return padded, described(torch.cat(rows)[None]), lengths


def _packed_images(truth: Truth) -> None:
    _, packed, lengths = _adjacent_images()
    ids = torch.arange(2).repeat_interleave(lengths)[None]
    positions = torch.cat([torch.arange(int(size)) for size in lengths])[None]
    for ring, marks in ((1, {"position_ids": positions}), (2, {"document_ids": ids})):
        model = longspan.parallelize(build("Gemma3"), sharding(ring=ring))
        out = model(**packed, **marks)
        out.loss.backward()
        check_loss(float(out.loss.detach()), truth)
        check_gradients(gradients(model), truth)


def test_packed_images_see_themselves_only(pool2: RankPool) -> None:
    """transformers' own mask of packed rows looks images up by positions that restart, so compare with padded rows."""
    pool2.run(_packed_images, truth_of(build("Gemma3"), _adjacent_images()[0]))


@on_ranks(2)
def test_images_in_chunks_of_a_prompt() -> None:
    whole = batch("Gemma3", ((3, ("image", 1, 4, 4), 4, ("image", 1, 4, 4), 2),))
    del whole["labels"]
    ids, types, pixels = (whole[key] for key in ("input_ids", "token_type_ids", "pixel_values"))
    cut = 3 + 18 + 4  # the token that opens the second image follows
    with torch.no_grad():
        expected = build("Gemma3").eval()(**whole).logits[:, -1]
        for ring in (1, 2):
            model = longspan.parallelize(build("Gemma3"), sharding(ring=ring), fsdp=False).eval()
            cache = longspan.ShardedCache(model)
            first = {"input_ids": ids[:, :cut], "token_type_ids": types[:, :cut], "pixel_values": pixels[:1]}
            model(**first, past_key_values=cache)
            inside = {"input_ids": ids[:, cut + 1 :], "token_type_ids": types[:, cut + 1 :], "pixel_values": pixels[1:]}
            with pytest.raises(longspan.LongspanError, match=r"row 0: the new tokens behind 25 .* begin with an image"):
                model(**inside, past_key_values=cache)
            rest = {"input_ids": ids[:, cut:], "token_type_ids": types, "pixel_values": pixels[1:]}
            found = model(**rest, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_dropout_in_the_tower() -> None:
    whole = batch("Gemma3", SQUARE_ROWS)
    config = {**FAMILIES["Gemma3"]["vision_config"], "attention_dropout": 0.1}
    model = longspan.parallelize(build("Gemma3", vision_config=config), sharding(), fsdp=False)
    with pytest.raises(
        longspan.LongspanError, match=r"layer model.vision_tower.*self_attn of the vision tower has drop"
    ):
        model.train()(**whole)
    model.model.vision_tower.eval()
    model(**whole).loss.backward()
    off = longspan.parallelize(build("Gemma3", vision_config=config), sharding(), fsdp=False, dropout=0.0)
    off.train()(**whole).loss.backward()


@on_ranks(2)
def test_refusals_of_tiles_and_images() -> None:
    whole, sp = batch("LlavaOnevision", TILES["LlavaOnevision"]), sharding()
    model = longspan.parallelize(build("LlavaOnevision"), sp)

    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(longspan.LongspanError, match=match):
            model(**{**whole, **changes})

    pixels, sizes, videos = (whole[key] for key in ("pixel_values", "image_sizes", "pixel_values_videos"))
    refused(r"image 0 of \[24, 32\] pixels has 5 tiles, `pixel_values` has room for 3 per", pixel_values=pixels[:, :3])
    refused("`image_sizes` has 3 entries, `pixel_values` 4 images", image_sizes=sizes[1:])
    refused(r"`input_ids` has 26 video placeholders .* gives 18 embeddings", pixel_values_videos=videos[:, 1:])
    refused(r"`vision_aspect_ratio` is read from the model's config", vision_aspect_ratio="anyres_max_9")
    if sp.rank:
        whole["pixel_values_videos"] = videos.flip(1)
    refused(r"ranks 1 were given another one than ranks 0 .same shapes, other")


def test_units_are_balanced() -> None:
    assert split_by_cost([4, 4, 4, 4], 2) == ((0, 2), (2, 4))
    assert split_by_cost([10, 1, 1, 1, 1], 2) == ((0, 1), (1, 5))
    assert split_by_cost([5], 3) == ((0, 1), (1, 1), (1, 1))
    assert split_by_cost([], 2) == ((0, 0), (0, 0))
