"""Channel clustering: the dense model stays what it is, planted groups are found, checkpoints carry the order."""

import itertools
import json

import pytest
import torch
from lora_models import PROJECTIONS
from peft import PeftModel
from safetensors.torch import load_file
from test_cli import TINY
from tiny import FAMILIES, pattern, routed, stock, tokens
from torch import Tensor, nn
from training import build_module, tiny_run_config

from wide import cluster
from wide.adapter import add_lora, merge
from wide.base_model import fingerprint, load_base
from wide.checkpoint import from_pretrained, save_pretrained
from wide.methods import load as load_method
from wide.model import RoutedModel
from wide.options import ModelConfig, StageConfig

TINY_MODEL = ModelConfig(name="tiny", source="tiny", family="llama", dtype="float32")


def random_order(model: RoutedModel, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size, layers = model.geometry.ffn_size, model.geometry.num_layers
    return torch.stack([torch.randperm(size, generator=generator) for _ in range(layers)])


def permuted(family: str = "llama", **options) -> RoutedModel:
    """A tiny routed model in a random channel order."""
    model = routed(family, **{"cluster_channels": True, "compensation": True} | options)
    model.gates.channel_order.copy_(random_order(model))
    cluster.permute_channels(model, model.gates.channel_order)
    return model


def with_lora(model: RoutedModel) -> RoutedModel:
    """LoRA that matters: B is not zero."""
    model = add_lora(model, StageConfig(lora_rank=4))
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_permuted_dense_model_equals_the_stock_one(family):
    model, ids = permuted(family), tokens(2, 12)
    with model.dense():
        torch.testing.assert_close(logits(model, ids), logits(stock(family), ids), atol=1e-5, rtol=0)
    before, after = stock(family).model.layers[0].mlp, model.decoder_layers()[0].mlp
    assert not torch.equal(before.up_proj.weight, after.up_proj.weight)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_covers_the_channels_that_the_order_names(family):
    """Against the stock model with those very channels zeroed by the stock index."""
    model, ids = permuted(family, compensation=False), tokens(2, 12)
    gates = pattern(model, 2, 12)
    expected = stock(family)
    for index, layer in enumerate(expected.model.layers):
        keep = torch.zeros(2, 12, model.geometry.ffn_size)
        order, size = model.gates.channel_order[index], model.gates.ffn_group_size
        for group, members in enumerate(order.split(size)):
            keep[..., members] = gates["ffn"][index][..., group, None]
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args, keep=keep: (args[0] * keep,))
    with model.forced(torch.ones_like(gates["attention"]), gates["ffn"]):
        torch.testing.assert_close(logits(model, ids), logits(expected, ids), atol=1e-5, rtol=0)


def test_order_by_hand():
    clusters = torch.tensor([1, 0, 1, 2, 0, 2])
    assert cluster.order_of(clusters).tolist() == [0, 2, 1, 4, 3, 5]


def test_permutation_by_hand():
    model = routed("llama")
    mlp = model.decoder_layers()[1].mlp
    up, down = mlp.up_proj.weight.clone(), mlp.down_proj.weight.clone()
    order = random_order(model)
    cluster.permute_channels(model, order)
    for new, old in enumerate(order[1].tolist()):
        assert torch.equal(mlp.up_proj.weight[new], up[old]) and torch.equal(mlp.down_proj.weight[:, new], down[:, old])


def test_stock_order_inside_the_block_and_the_own_one_after_it():
    model, original = permuted(), stock("llama").state_dict()
    own = {name: value.clone() for name, value in model.model.state_dict().items()}
    with cluster.stock_order(model):
        assert all(torch.equal(value, original[name]) for name, value in model.model.state_dict().items())
    assert all(torch.equal(value, own[name]) for name, value in model.model.state_dict().items())


def test_assignment_of_greatest_likeness_with_room_for_all():
    """Against the definition: pairs in falling order of likeness, each taken while channel and cluster are free."""
    likeness = torch.rand(12, 3, generator=torch.Generator().manual_seed(1))
    left, expected = [4, 4, 4], {}
    pairs = sorted(itertools.product(range(12), range(3)), key=lambda pair: -likeness[pair])
    for channel, place in pairs:
        if channel not in expected and left[place]:
            expected[channel], left[place] = place, left[place] - 1
    assert cluster.assign(likeness, 4).tolist() == [expected[channel] for channel in range(12)]


def planted(groups: int, size: int, num_tokens: int, noise: float) -> tuple[Tensor, Tensor]:
    """Firing [F, N] of shuffled groups whose channels fire together, each at a strength of its own; group of each."""
    generator = torch.Generator().manual_seed(3)
    fires = (torch.rand(groups, num_tokens, generator=generator) < 0.3).float()
    owner = torch.arange(groups).repeat_interleave(size)[torch.randperm(groups * size, generator=generator)]
    strength = 0.1 + torch.rand(groups * size, 1, generator=generator)
    noisy = fires[owner] + noise * torch.rand(groups * size, num_tokens, generator=generator)
    return strength * noisy, owner


@pytest.mark.parametrize(("groups", "size"), [(5, 8), (12, 16), (3, 1), (1, 6)])
def test_planted_groups_are_recovered(groups, size):
    firing, owner = planted(groups, size, num_tokens=256, noise=0.5)
    found = cluster.order_of(cluster.balanced_clusters(firing, size))
    assert sorted(found.tolist()) == list(range(groups * size))
    assert all(len(set(owner[members].tolist())) == 1 for members in found.split(size))


def test_clustering_says_the_same_twice_and_survives_channels_that_never_fire():
    firing, _ = planted(4, 8, num_tokens=64, noise=2.0)
    firing[:5] = 0
    clusters = cluster.balanced_clusters(firing, 8, seed=2)
    assert torch.equal(clusters, cluster.balanced_clusters(firing, 8, seed=2))
    assert torch.equal(clusters.bincount(), torch.full((4,), 8))


def test_firing_is_the_length_of_each_channels_contribution_over_real_tokens():
    model, ids = routed("llama"), tokens(2, 6)
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    inputs: list[Tensor] = []
    layer = model.decoder_layers()[1]
    layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
    fired = cluster.measure_firing(model, [{"input_ids": ids, "attention_mask": mask}])[1]
    contributions = inputs[0][mask.bool()][:, None] * layer.mlp.down_proj.weight  # [N, D, F]
    assert fired.shape == (160, 10)
    torch.testing.assert_close(fired.float(), contributions.norm(dim=1).T, rtol=2**-8, atol=0)


def test_find_order_recovers_channels_that_are_copies_of_each_other():
    """Copies fire together whatever the text: eight distinct channels, each in twenty scattered places."""
    model = routed("llama", ffn_group_size=20)
    owner = torch.arange(160) % 8
    for layer in model.decoder_layers():
        for weight in (layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight):
            weight.data = weight[owner]
    order = cluster.find_order(model, [{"input_ids": tokens(8, 32, seed=i)} for i in range(2)])
    for row in order:
        assert sorted(row.tolist()) == list(range(160))
        assert all(len(set(owner[members].tolist())) == 1 for members in row.split(20))


def config_of(model: RoutedModel):
    return load_method("wide").Config(
        attn_group_size=model.gates.attn_group_size,
        ffn_group_size=32,
        router_rank=4,
        compensation=True,
        cluster_channels=True,
    )


@pytest.mark.parametrize("lora", (False, True))
def test_checkpoint_brings_the_order_back(tmp_path, lora):
    model = with_lora(permuted()) if lora else permuted()
    stock_print = fingerprint(stock("llama"))
    save_pretrained(model, tmp_path / "c", model=TINY_MODEL, method=config_of(model), base_fingerprint=stock_print)
    assert load_file(tmp_path / "c" / "routers.safetensors")["channel_order"].equal(model.gates.channel_order)
    loaded, ids = from_pretrained(tmp_path / "c"), tokens(2, 12)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.num_attached_masks() == 4
    if lora:
        torch.testing.assert_close(logits(merge(loaded), ids), logits(model, ids), atol=1e-5, rtol=0)


def test_saved_adapter_fits_the_stock_model(tmp_path):
    """peft alone, which knows nothing of the order, puts it on the stock weights."""
    model, ids = with_lora(permuted()), tokens(2, 12)
    assert {name.split(".")[-1] for name in PROJECTIONS} == set(model.layout.projections)
    print_ = fingerprint(stock("llama"))
    save_pretrained(model, tmp_path / "c", model=TINY_MODEL, method=config_of(model), base_fingerprint=print_)
    alone = PeftModel.from_pretrained(load_base(TINY_MODEL, torch.device("cpu")), tmp_path / "c" / "adapter")
    with RoutedModel.dense(model):
        torch.testing.assert_close(logits(alone, ids), logits(model, ids), atol=1e-5, rtol=0)


def test_changed_base_is_still_noticed(tmp_path):
    model = permuted()
    print_ = fingerprint(stock("llama"))
    model.decoder_layers()[0].mlp.up_proj.weight.data += 1.0
    with pytest.raises(ValueError, match="base weights have changed"):
        save_pretrained(model, tmp_path / "c", model=TINY_MODEL, method=config_of(model), base_fingerprint=print_)


def test_resuming_into_another_order_is_refused(tmp_path):
    config = tiny_run_config(tmp_path, {"steps": 2, "batch_size": 4}, {"cluster_channels": True})
    module = build_module(config)
    checkpoint = {"history": [], "state_dict": {"routed.gates.channel_order": random_order(module.routed)}}
    with pytest.raises(ValueError, match="another order"):
        module.on_load_checkpoint(checkpoint)
    module.routed.gates.channel_order.copy_(checkpoint["state_dict"]["routed.gates.channel_order"])
    module.on_load_checkpoint(checkpoint)


def test_a_run_clusters_and_its_second_stage_and_its_resumption_keep_the_order(cli):
    options = (*TINY, "method.cluster_channels=true", "eval.new_tokens=0")
    assert cli(*options, "hydra.run.dir=first").returncode == 0
    order = load_file(cli.folder / "first/checkpoint/routers.safetensors")["channel_order"]
    assert not torch.equal(order, torch.arange(order.shape[1]).expand_as(order))
    from_pretrained(cli.folder / "first" / "checkpoint")
    second = cli(*options, "stage=lora", "stage.steps=2", "stage.from_checkpoint=first", "hydra.run.dir=second")
    assert second.returncode == 0, second.stderr
    resumed = cli(*options, "resume=first", "hydra.run.dir=resumed")
    assert resumed.returncode == 0, resumed.stderr
    for folder in ("second", "resumed"):
        found = load_file(cli.folder / folder / "checkpoint/routers.safetensors")["channel_order"]
        assert torch.equal(found, order)
        report = json.loads((cli.folder / folder / "report.json").read_text())["held_out"]
        first = json.loads((cli.folder / "first" / "report.json").read_text())["held_out"]
        assert report["dense_perplexity"] == pytest.approx(first["dense_perplexity"], rel=1e-5)
    assert report["routed_perplexity"] == pytest.approx(first["routed_perplexity"], rel=1e-5)
