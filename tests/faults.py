"""Plant one fault at a time in a copy of the sources, and check that its tests fail.

    python -m tests.faults                     # all of them: `make faults`
    python -m tests.faults --only loss_count   # some of them, by name

A test suite may shrink as long as every fault is seen. Each fault replaces a short text that occurs once in its file. A
missing text is an error, so whoever moves or rewrites that line adapts the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "Makefile", "README.md")
LIMIT_S = 900


@dataclass(frozen=True)
class Fault:
    """A change of one line that makes longspan wrong.

    Attributes:
        name: of the fault.
        file: below `src/longspan`.
        old: the text that is replaced; it occurs once in the file.
        new: what replaces it.
        tests: arguments of pytest; at least one of the tests that they select must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


class FaultNotFound(Exception):
    """The text of a fault is missing, or occurs several times."""


FAULTS = (
    # core: arithmetic of heads, layouts, masks
    Fault("last_kv_head_of_a_rank", "core/heads.py", "start // per_kv, -(-stop // per_kv)",
          "start // per_kv, max(start // per_kv + 1, stop // per_kv)", "tests/core/test_layout.py -k heads"),
    Fault("zigzag_takes_the_second_half_in_order", "core/layout.py",
          "((last - i) * half, (last - i + 1) * half)", "((i + ring) * half, (i + ring + 1) * half)",
          "tests/attn/test_ring.py -k balances"),
    Fault("window_region_one_key_short", "core/regions.py", "max(k0, q0 - hi)", "max(k0, q0 - hi + 1)",
          "tests/core/test_regions.py"),
    Fault("pairs_of_a_band", "core/regions.py", "self._pairs_from(self.hi + 1)", "self._pairs_from(self.hi)",
          "tests/core/test_regions.py"),
    Fault("chunks_ignore_restarting_positions", "attn/segments.py", "- position % chunk_size", "",
          "tests/hf/test_models.py -k 'chunks and follow'"),
    Fault("message_sent_a_hop_too_few", "core/routes.py", "% len(self.right), direction) >= hop",
          "% len(self.right), direction) > hop", "tests/attn/test_p2p_schedule.py -k matches_its_receive"),
    # attn: masks, softmax, ring
    Fault("window_one_token_too_wide", "attn/mask.py", "None if self.window is None else self.window - 1",
          "None if self.window is None else self.window", "tests/attn/test_ring.py -k test_one_device"),
    Fault("softmax_merge_not_normalized", "attn/kernels/base.py", "return weights.div_(",
          "return weights.mul_(1 + 0 * ", "tests/attn/test_ring.py -k test_one_device"),
    Fault("empty_rows_are_nan", "attn/kernels/base.py", ".clamp_(min=torch.finfo(lses.dtype).min)", "",
          "tests/attn/test_ring.py -k 'minus_infinity or every_mesh'"),
    Fault("sink_gradient_sign", "attn/methods/local.py", "dsinks = -(", "dsinks = (",
          "tests/attn/test_ring.py -k test_one_device"),
    Fault("ring_drops_gradients_on_the_way", "attn/methods/ring.py",
          "self.local_grad.like(self.partial_sums.pop(direction))",
          "self.local_grad.like(self.partial_sums.pop(direction).zero_())", "tests/attn/test_ring.py -k every_mesh"),
    Fault("ring_drops_returned_gradients", "attn/methods/ring.py", "self.local_grad.message.add_(part)", "pass",
          "tests/attn/test_ring.py -k every_mesh"),
    Fault("uneven_kv_group_overwrites", "attn/methods/local.py", "sum_BKTD.index_add_(1,",
          "sum_BKTD.index_copy_(1,", "tests/attn/test_ring.py -k every_mesh"),
    Fault("second_gradient_replaces_the_first", "attn/kernels/base.py", "self._summed()[at].add_(more)",
          "self._summed()[at].copy_(more)", "tests/attn/test_ring.py -k test_one_device"),
    Fault("single_result_summed_in_fp32", "attn/kernels/base.py", "if self._several:", "if True:",
          "tests/attn/test_live_bytes.py -k one_device"),
    Fault("padding_ends_a_token_early", "attn/segments.py", "torch.stack([count, first, last + 1], -1)",
          "torch.stack([count, first, last], -1)", "tests/hf/test_batch.py"),
    Fault("documents_begin_a_token_early", "attn/segments.py", "starts_of_row[b].append(i + 1)",
          "starts_of_row[b].append(i)", "tests/hf/test_batch.py"),
    # comm: collectives and their adjoints
    Fault("scatter_adjoint_drops_copies_of_a_kv_head", "comm/all_to_all.py",
          "part_GRLBhD[:, 0] if part_GRLBhD.shape[1] == 1 else part_GRLBhD.sum(1)", "part_GRLBhD[:, 0]",
          "tests/attn/test_ulysses.py -k test_exact"),
    Fault("uneven_heads_not_summed", "comm/all_to_all.py", "write_heads(recv, sums, spans, replicated)",
          "write_heads(recv, sums, spans, [False] * len(sums))", "tests/attn/test_ulysses.py -k test_exact"),
    Fault("late_gradients_not_added", "attn/methods/head_chunks.py", "[out.adds for out in outs]",
          "[False] * len(outs)", "tests/attn/test_head_chunks.py -k test_exact"),
    Fault("reshard_adjoint_with_sizes_not_swapped", "comm/reshard.py",
          "grad, shard_dim, gather_dim, sharded, gathered, group\n",
          "grad, shard_dim, gather_dim, gathered, sharded, group\n", "tests/comm/test_dsp.py"),
    Fault("recomputed_block_with_sizes_of_another_forward", "diffusion/tokens.py",
          "with self.of_forward(sizes):", "with contextlib.nullcontext():",
          "tests/diffusion/test_diffusion.py -k recomputed"),
    Fault("joint_mask_in_another_order", "diffusion/attention.py", "mask = keys.in_order_of_ranks(mask, 3)",
          "mask = mask.clone()", "tests/diffusion/test_diffusion.py -k Hunyuan"),
    Fault("ring_without_its_last_block_of_text", "diffusion/attention.py",
          "seen = _padded(seen, 3, keys, value=False)",
          "seen = _padded(seen, 3, keys, value=False); seen[..., keys.of_ranks[-1] - 1 - max(keys.of_ranks)] = False",
          "tests/diffusion/test_diffusion.py -k rings"),
    Fault("replicated_text_counted_on_every_rank", "diffusion/tokens.py",
          "return self._each(x, dim, self.held, self._shard, split=False)",
          "return self._each(x, dim, self.held, lambda part, dim, n: part.narrow(dim, 0, self._shard(part, dim, n)"
          ".shape[dim]), split=False)", "tests/diffusion/test_diffusion.py -k other_structures"),
    Fault("states_of_linear_attention_not_summed", "diffusion/attention.py",
          "replicate(sum_over(func(*args, **kwargs), group), group_name(group))", "func(*args, **kwargs)",
          "tests/diffusion/test_diffusion.py -k 'other_structures and Sana'"),
    Fault("row_above_of_a_convolution_left_out", "diffusion/attention.py",
          "above = first_and_last[2 * rank - 1] if rank else nothing", "above = nothing",
          "tests/diffusion/test_diffusion.py -k 'other_structures and Sana'"),
    Fault("order_of_streams_not_checked", "diffusion/check.py", "tokens.fewest = max(tokens.sizes.lengths)", "pass",
          "tests/diffusion/test_diffusion.py -k fewer"),
    Fault("rows_of_another_rank_after_a_switch", "diffusion/tokens.py",
          "return shard_along(x, 0, self.sp.group)", "return shard_along(x.flip(0), 0, self.sp.group)",
          "tests/diffusion/test_diffusion.py -k 'keeps and Latte'"),
    Fault("small_copy_is_not_compared", "diffusion/check.py",
          "problem = _difference(small, structure, sp, variants, expected)", 'problem = ""',
          "tests/diffusion/test_diffusion.py -k 'other_structures or refused_models'"),
    Fault("gradients_of_diffusion_inputs_summed", "diffusion/parallelize.py",
          "scale_gradient(replicate(x, name), 1 / sp.size)",
          "replicate(x, name)", "tests/diffusion/test_diffusion.py -k LTX"),
    Fault("loss_counted_as_one_rank's", "hf/forward/loss.py", "scale_gradient(sums, self.sp.fsdp_size)[0] / items",
          "sums[0] / items", "tests/losses/test_custom_losses.py -k terms"),
    Fault("trainer_counts_a_loss_once_per_replica", "trainers/mixin.py", "during(replicas=self.longspan_sp.data_size)",
          "during(replicas=1)", "tests/losses/test_custom_losses.py -k trainer"),
    Fault("gradient_of_a_sum_twice", "comm/collectives.py", "lambda grad, group: grad)",
          "lambda grad, group: 2 * grad)", "tests/losses/test_loss.py"),
    Fault("gather_gradient_not_summed", "comm/collectives.py", "_OPERATORS.reduce_scatter(", "_OPERATORS.local_part(",
          "tests/hf/test_batch.py -k inverse"),
    Fault("padding_value_ignored", "comm/shard.py", "x.new_full(shape, pad_value)", "x.new_zeros(shape)",
          "tests/hf/test_batch.py"),
    Fault("digest_misses_high_bits", "comm/weights.py", "return x | 1", "return x & ~1",
          "tests/comm/test_digests.py"),
    Fault("replicated_gradient_not_summed", "comm/collectives.py", "return all_reduce(grads[0], ctx.group), None",
          "return grads[0], None", "tests/hf/test_tensor.py -k 'one_process and Llama'"),
    Fault("embeddings_of_pictures_one_row_off", "hf/forward/vision.py",
          "rows[to_device(torch.cat(sent), rows.device)]",
          "rows[to_device(torch.cat(sent), rows.device)].roll(1, 0)",
          "tests/verify/test_pictures.py -k 'passes and Qwen3VL'"),
    Fault("gradients_of_embeddings_not_sent_back", "comm/collectives.py",
          "_OPERATORS.all_to_all_rows(grad", "0 * _OPERATORS.all_to_all_rows(grad",
          "tests/verify/test_pictures.py -k 'passes and Qwen3VL'"),
    Fault("positions_of_pictures_count_tokens", "hf/forward/shard_batch.py", "positions = traits.positions(call.batch)",
          "positions = None", "tests/verify/test_pictures.py -k 'passes and Qwen3VL'"),
    Fault("padding_of_sounds_encoded", "hf/model/examples.py", "if real is not None:  # of padded sounds",
          "if False:", "tests/hf/test_rule.py -k 'one_process and gemma4'"),
    Fault("added_rows_one_off", "compat/reading.py", "rows.to(x_BLD.dtype)", "rows.roll(1, 0).to(x_BLD.dtype)",
          "tests/hf/test_rule.py -k forward_adds"),
    Fault("added_rows_of_the_last_batch", "hf/forward/vision.py", "self.inserted.pop().remove()", "self.inserted.pop()",
          "tests/hf/test_rule.py -k forward_adds"),
    Fault("raw_sounds_are_left_to_generate", "compat/transformers_api.py", "model._maybe_prepare_encoder_kwargs",
          "model._prepare_multimodal_encoder_kwargs", "tests/hf/test_rule.py -k in_chunks"),
    Fault("rows_of_the_last_batch", "hf/forward/vision.py", "encode_again(self.core)", "pass",
          "tests/hf/test_rule.py -k replicas"),
    Fault("padding_pictures_counted", "hf/model/rule.py", "values = {key: x.float().cpu() if",
          "values = {key: torch.ones_like(x) if", "tests/hf/test_rule.py -k units"),
    Fault("placeholders_that_nothing_fills", "hf/forward/vision.py", "if ids is None or token in filled else int(",
          "if True else int(", "tests/hf/test_rule.py -k wrong_numbers"),
    Fault("rule_does_not_compare_logits", "hf/model/rule.py",
          "if not _close(found[self.mask == 1], expected[self.mask == 1]):", "if False:",
          "tests/hf/test_rule.py -k 'check_sees or refused'"),
    Fault("rule_does_not_compare_masks", "hf/model/rule.py", "if not _equal_masks(", "if False and not _equal_masks(",
          "tests/hf/test_rule.py -k refused"),
    # mixers
    Fault("rank_starts_from_a_zero_state", "mixers/combine.py", "return state[0].to(added.dtype)",
          "return 0 * state[0].to(added.dtype)", "tests/mixers/test_mixers.py -k 'every_mesh and 2-2'"),
    Fault("state_gradient_not_passed_on", "mixers/combine.py", "return grads.to(dtype),",
          "return 0 * grads.to(dtype),",
          "tests/mixers/test_mixers.py -k 'every_mesh and 2-2'"),
    Fault("transition_not_applied", "mixers/combine.py", "= _advance(later, added[:pairs], added[split:])",
          "= added[:pairs].double() + added[split:].double()",
          "tests/mixers/test_mixers.py -k 'every_mesh and 4-4'"),
    Fault("transition_transposed", "mixers/combine.py", "flat = transition.flatten(0, 2),",
          "flat = transition.mT.flatten(0, 2),", "tests/mixers/test_mixers.py -k 'every_mesh and 4-4'"),
    Fault("state_of_the_document_before", "mixers/fragments.py", "c[0][1] > row[c[0][0]][0]", "c[0][1] > 0",
          "tests/mixers/test_mixers.py -k 'every_mesh and 4-4'"),
    Fault("chain_of_states_in_bf16", "mixers/combine.py", "return state[0].to(added.dtype)",
          "return state[0].bfloat16().to(added.dtype)",
          "tests/mixers/test_mixers.py -k 'every_mesh and 2-2'"),
    Fault("scan_gradient_not_transposed", "mixers/plain_torch.py", "step if step.shape[-1] == 1 else step.mT", "step",
          "tests/mixers/test_mixers.py -k one_device"),
    Fault("decay_after_the_delta_rule", "mixers/plain_torch.py", "cut(decay_BTHD).cumsum(-2)",
          "cut(decay_BTHD.roll(1, 1)).cumsum(-2)", "tests/mixers/test_mixers.py -k one_device"),
    Fault("erased_values_not_decayed", "mixers/plain_torch.py", "beta * k_in], -1)", "beta * k], -1)",
          "tests/mixers/test_mixers.py -k one_device"),
    Fault("convolution_without_its_halo", "mixers/short_conv.py", "before[f.slot][rows] if",
          "before[f.slot][rows] * 0 if", "tests/mixers/test_short_conv.py -k shorter"),
    Fault("convolution_looks_past_a_short_run", "mixers/short_conv.py", "missing if other == reaching.start else",
          "missing if True else",
          "tests/mixers/test_short_conv.py -k shorter"),
    Fault("failed_rank_leaves_the_others_waiting", "mixers/state_passing.py",
          "locals_, problem = None, problem or error", "raise", "tests/mixers/test_mixers.py -k fails_on_one_rank"),
    # losses
    Fault("loss_keeps_an_fp32_part", "losses/cross_entropy.py", "del grad  # before the next one is allocated",
          "pass", "tests/attn/test_live_bytes.py -k step"),
    Fault("loss_counts_masked_labels", "hf/forward/loss.py", "count = labels != IGNORE",
          "count = labels == labels", "tests/losses/test_loss.py"),
    Fault("weights_not_in_the_gradient", "losses/cross_entropy.py",
          "scaled(torch.ones_like(lse_T), labels_T, weights_T)", "scaled(torch.ones_like(lse_T), labels_T, None)",
          "tests/attn/test_trees.py -k weights"),
    Fault("label_smoothing_gradient", "losses/cross_entropy.py", "-(1 - terms.label_smoothing) * scale_T",
          "-1 * scale_T", "tests/losses/test_token_loss.py -k test_loss_and_gradients"),
    Fault("z_loss_gradient", "losses/cross_entropy.py", "(1 + 2 * terms.z_loss * lse_T)",
          "(1 + terms.z_loss * lse_T)", "tests/losses/test_token_loss.py -k test_loss_and_gradients"),
    Fault("teacher_misaligned_by_a_token", "losses/divergence.py", "self.teacher.hidden.shape[-1])[span]",
          "self.teacher.hidden.shape[-1]).roll(1, 0)[span]", "tests/losses/test_distillation.py -k test_models"),
    Fault("temperature_of_the_student_alone", "losses/divergence.py",
          "self.teacher.compute(hidden_TD).to(dtype).div(self.temperature)",
          "self.teacher.compute(hidden_TD).to(dtype)", "tests/losses/test_distillation.py -k test_loss_and_gradients"),
    Fault("divergence_averaged_per_rank", "hf/forward/loss.py",
          "sums = sum_over(torch.stack([total.double(), count.double()]), self.sp.fsdp_group)",
          "sums = sum_over(torch.stack([total.double() / count.clamp(min=1), count / count]), self.sp.fsdp_group)",
          "tests/losses/test_distillation.py -k test_models"),
    Fault("top_k_takes_the_last_of_equals", "losses/divergence.py", "equal_TV.cumsum(-1) + before_T <=",
          "equal_TV.flip(-1).cumsum(-1).flip(-1) + before_T <=",
          "tests/losses/test_distillation.py -k 'gradients or equal'"),
    Fault("top_k_of_a_shard", "losses/divergence.py", "above_PT.sum(0)[:, None], equal_PT",
          "above_T, equal_PT", "tests/losses/test_distillation.py -k equal"),
    Fault("top_k_forgets_the_others", "losses/divergence.py", "~largest(log_q_TV, self.top_k, shard)",
          "largest(log_q_TV, self.top_k, shard) & False",
          "tests/losses/test_distillation.py -k test_loss_and_gradients"),
    Fault("rounding_of_small_divergences", "losses/divergence.py", "total_of(of_p_TV - excess_TV, shard)",
          "total_of(of_p_TV, shard)",
          "tests/losses/test_distillation.py -k rounded_away"),
    Fault("plan_gathers_a_teachers_head_once", "plan/cost/communication.py", 'f"weights of {head}"',
          'f"weights of no {head}"', "tests/plan/test_counts.py -k teacher"),
    Fault("teacher_has_a_backward_in_the_mfu", "trainers/figures.py", "2 * forwards + backwards *", "2 * forwards +",
          "tests/trainers/test_figures.py -k flops_of_experts"),
    Fault("teacher_without_generated_tokens", "train/resolve.py", "shortest) + arguments.generated", "shortest)",
          "tests/train/test_command.py -k teacher_is_checked"),
    Fault("orpo_averaged_per_replica", "trainers/trl.py",
          "trainer.accelerator.gather_over_replicas(of_nll.sum()).mean()", "of_nll.sum()",
          "tests/trainers/test_trl.py -k 'one_process and orpo'"),
    Fault("distillation_counts_tokens_per_rank", "trainers/trl.py", ".clamp(min=1) / sp.model_size", ".clamp(min=1)",
          "tests/trainers/test_trl.py -k 'one_process and distillation'"),
    Fault("rollouts_see_other_branches", "trainers/trl.py", "on_path, 1 + numbers.repeat_interleave(ends.diff())",
          "on_path, len(numbers) + 0 * numbers.repeat_interleave(ends.diff())", "tests/trainers/test_async_grpo.py"),
    Fault("each_replica_takes_the_first_row", "trainers/trl.py", "iter(self.batches), self.sp.data_rank",
          "iter(self.batches), 0", "tests/trainers/test_async_grpo.py"),
    Fault("logprob_of_the_wrong_label", "losses/logprobs.py", "torch.where(counts, labels_T, 0)[:, None]",
          "torch.where(counts, 0, labels_T)[:, None].clamp_min(0)",
          "tests/losses/test_token_loss.py -k needs_each_tile_once"),
    Fault("flex_lists_of_two_widths", "attn/kernels/flex_blocks.py",
          "F.pad(indices, (0, width - indices.shape[-1]))", "indices", "tests/attn/test_flex.py -k brute_force"),
    # hf: cut, gradients, weights, generation
    Fault("labels_not_shifted", "hf/batch/shard.py", "out[:, :-1] = x[:, 1:]", "out[:, :] = x",
          "tests/hf/test_batch.py -k shifted"),
    Fault("labels_shifted_along_the_row_of_a_tree", "hf/batch/shard.py",
          "[values[f[0]] if f else fill for _, f in ends]",
          "[values[min(i + 1, len(values) - 1)] for i, _ in ends]", "tests/attn/test_trees.py -k along_paths"),
    Fault("branch_without_a_copy", "hf/batch/trees.py", "end = shared - 1 if", "end = shared if",
          "tests/attn/test_trees.py -k any_sequences"),
    Fault("subtree_ends_with_its_node", "attn/tree.py", "Region(start, end, start, stop, 0)",
          "Region(start, stop, start, stop, 0)", "tests/attn/test_trees.py -k 'one_device and Llama'"),
    Fault("window_along_the_row_of_a_tree", "attn/tree.py", "window - 1 + (start - first) - (k0 - at)", "window - 1",
          "tests/attn/test_trees.py -k 'one_device and Mistral'"),
    Fault("gradients_not_summed_without_fsdp", "hf/weights/gradients.py",
          "dist.all_reduce(x, group=self.group)", "pass",
          "tests/hf/test_parallelize.py -k 'accumulation or some_ranks'"),
    Fault("no_sync_keeps_the_last_only", "hf/weights/gradients.py",
          "self.pending[p].add_(grad) if p in self.pending else grad", "grad",
          "tests/hf/test_parallelize.py -k accumulation"),
    Fault("fsdp_sums", "hf/weights/fsdp.py", "average_gradients(model, sp.fsdp_size)", "average_gradients(model, 1)",
          "tests/hf/test_parallelize.py -k accumulation"),
    Fault("model_starts_from_a_zero_state", "mixers/combine.py", "return state[0].to(added.dtype)",
          "return 0 * state[0].to(added.dtype)", "tests/hf/test_hybrids.py -k 'one_process and Qwen3Next'"),
    Fault("state_gradient_of_a_model_not_passed_on", "mixers/combine.py", "return grads.to(dtype),",
          "return 0 * grads.to(dtype),",
          "tests/hf/test_hybrids.py -k 'one_process and Qwen3Next'"),
    Fault("chain_of_a_models_states_in_bf16", "mixers/combine.py", "return state[0].to(added.dtype)",
          "return state[0].bfloat16().to(added.dtype)", "tests/hf/test_hybrids.py -k 'one_process and Qwen3Next'"),
    Fault("model_decays_after_the_delta_rule", "hf/forward/mixer_functions.py", "** -0.5, k, v, g, beta)",
          "** -0.5, k, v, g.roll(1, 1), beta)", "tests/hf/test_hybrids.py -k 'one_process and Qwen3Next'"),
    Fault("convolution_without_halo", "hf/forward/mixer_functions.py", "layer.convolve(convolve, weight.shape[-1] - 1,",
          "layer.convolve(convolve, 0 * weight.shape[-1],", "tests/hf/test_hybrids.py -k 'one_process and Lfm2-'"),
    Fault("mamba2_does_not_read_the_state_before", "hf/forward/mixer_functions.py", "* kept_BTH.unsqueeze(-1)",
          "* 0", "tests/hf/test_hybrids.py -k 'one_process and Mamba2'"),
    Fault("mamba1_passes_a_state_without_decay", "hf/forward/mixer_functions.py", "* A_HK).exp().unsqueeze(3)",
          "* 0).exp().unsqueeze(3)", "tests/hf/test_hybrids.py -k 'one_process and Jamba'"),
    Fault("recurrent_layers_read_padding", "hf/forward/mixers.py", "batch, info.new_segments)", "batch, None)",
          "tests/hf/test_hybrids.py -k 'one_process and FalconH1'"),
    Fault("a_chunk_starts_from_a_zero_state", "hf/forward/mixer_functions.py", "else layer.cached.recurrent",
          "else None", "tests/generate/test_hybrids.py -k 'greedy and NemotronH-2'"),
    Fault("a_chunk_convolves_without_the_last_one", "hf/forward/mixers.py", "else cached.conv.mT",
          "else 0 * cached.conv.mT", "tests/generate/test_hybrids.py -k 'greedy and Lfm2-2'"),
    Fault("a_token_starts_from_another_state", "cache/recurrent.py", "self.recurrent = state",
          "self.recurrent = 2 * state", "tests/generate/test_hybrids.py -k 'greedy and Qwen3Next-1'"),
    Fault("kept_logits_off_by_one", "hf/forward/logits.py", "held[rank].append(before + token - start)",
          "held[rank].append(max(0, before + token - start - 1))", "tests/hf/test_parallelize.py -k logits_to_keep"),
    Fault("ranks_draw_other_tokens", "hf/cache/generate.py", "module.set_rng_state(shared.cpu())", "pass",
          "tests/generate/test_generate.py -k 'greedy or ways'"),
    # cache
    Fault("cache_forgets_a_token_of_the_window", "cache/attend.py", "max(0, length - window + 1)",
          "max(0, length - window + 2)", "tests/generate/test_generate.py -k greedy"),
    Fault("cache_merge_unweighted", "cache/attend.py", "weights, total, _ = exponentials(lses)",
          "weights, total, _ = exponentials(0 * lses)", "tests/cache/test_cache.py -k softmax"),
    Fault("cache_reads_the_first_tile_again", "cache/attend.py", "(tile * prepared.tile, (tile + 1) * prepared.tile)",
          "(0, prepared.tile)", "tests/cache/test_cache.py -k quantized"),
    Fault("static_step_overwrites_another_ranks_token", "cache/static.py", "end - len(step.local_spans)", "end - 1",
          "tests/cache/test_static_decode.py -k 'ranks and Llama'"),
    Fault("static_window_sees_all", "cache/static.py", "first_visible_token(step.past, self.window, None)", "0",
          "tests/cache/test_static_decode.py -k 'ranks and Gemma3Text'"),
    Fault("static_step_has_a_position_of_the_host", "hf/forward/binding.py", "info.step.static.index",
          "torch.tensor([info.step.past])", "tests/cache/test_static_decode.py -k 'operators and Llama4Text'"),
    Fault("generated_tokens_see_padding", "hf/cache/kv_cache.py", "((row[0][0], length),)", "((0, length),)",
          "tests/generate/test_generate.py -k greedy"),
    Fault("crop_keeps_rejected_tokens", "core/cache.py", "(a, min(b, length)) for a, b in runs",
          "(a, b) for a, b in runs", "tests/generate/test_generate.py -k drafted"),
    # memory
    Fault("final_norm_not_tiled", "hf/memory.py", ", *filter(_is_norm, final_norm(model))]", "]",
          "tests/attn/test_live_bytes.py -k step"),
    Fault("slices_lose_gradients_of_shared_heads", "memory/head_slices.py",
          "total.narrow(rule.dim, start, stop - start).add_(", "total.narrow(rule.dim, start, stop - start).copy_(",
          "tests/memory/test_head_slices.py -k test_gradients_equal_those_of_one_slice"),
    Fault("input_gradient_of_the_last_projection_alone", "memory/head_slices.py", "[span].addmm_(grad, x.weight",
          "[span].copy_(grad @ x.weight",
          "tests/memory/test_head_slices.py -k test_gradients_equal_those_of_one_slice"),
    Fault("uncomputed_norm_left_out", "memory/tiles.py", "run, x = tiled, hidden", "run, x = module, hidden",
          "tests/memory/test_head_slices.py -k test_norms_that_are_read"),
    Fault("norm_output_written_without_gradients_recomputed", "memory/tiles.py", "version_of(x) != node.version",
          "version_of(x) < 0", "tests/memory/test_head_slices.py -k hooks_may_change"),
    Fault("stand_in_computed_for_one_reader_alone", "memory/tiles.py", "return x if computed is None else computed",
          "return x", "tests/memory/test_head_slices.py -k hooks_may_change"),
    Fault("plan_of_experts_counts_as_one_of_attention", "plan/from_model.py",
          "any(pattern.endswith((\".o_proj\", \".dense\")) for pattern in tensor_plan_of(config))",
          "bool(tensor_plan_of(config))", "tests/memory/test_head_slices.py -k planner_slices"),
    Fault("layers_before_the_last_free_nothing", "plan/cost/slices.py", "if behind else last", "if False else last",
          "tests/memory/test_head_slices.py -k fewest"),
    Fault("slices_of_a_shorter_batch", "hf/memory.py", "or local_tokens <= self.most_tokens", "or local_tokens == 0",
          "tests/memory/test_head_slices.py -k fewest"),
    Fault("slices_planned_without_earlier_gradients", "plan/layers/softmax.py", "waiting if waiting <= c.d else c.d",
          "0", "tests/attn/test_live_bytes.py -k slices"),
    Fault("gradients_of_slices_that_share_kv_heads_replaced", "memory/head_slices.py",
          "earlier.gradient.to(_wide(found.gradient)) + found.gradient", "found.gradient",
          "tests/memory/test_head_slices.py -k test_gradients_equal_those_of_one_slice"),
    Fault("gradients_of_slices_do_not_wait", "memory/head_slices.py",
          "not self.needs_grad or self.gradient is not None", "True",
          "tests/memory/test_head_slices.py -k wait_for_several"),
    Fault("float8_scales_of_gradients_accepted", "compat/friends_api.py", "for cast in (*coarse, *of_weights)",
          "for cast in coarse", "tests/hf/test_float8.py -k of_features"),
    Fault("float8_scale_of_a_rank", "compat/friends_api.py", "        reduce(largest)\n", "",
          "tests/hf/test_float8.py -k one_scale"),
    Fault("float8_gather_planned_in_full", "plan/cost/weights.py", "tuple(p for p in parameters if p.in_float8)",
          "()", "tests/hf/test_float8.py -k planned"),
    Fault("float8_head_accepted", "hf/forward/float8.py", "if layer is model.get_output_embeddings()", "if not path",
          "tests/hf/test_float8.py -k heads"),
    Fault("float8_layers_planned_in_slices", "plan/from_model.py", "is not None and not in_float8", "is not None",
          "tests/hf/test_float8.py -k heads"),
    Fault("write_during_offload_unnoticed", "memory/offload/store.py", "version_of(self.data) != self._version",
          "version_of(self.data) < 0", "tests/memory/test_offload.py"),
    Fault("change_in_place_unnoticed", "memory/activations.py", "if version_of(self.x) != self.version:",
          "if version_of(self.x) < 0:", "tests/memory/test_activations.py"),
    # checkpoint
    Fault("checksum_not_compared", "checkpoint/damage.py", "if found != records[name]:",
          "if found.size != records[name].size:", "tests/checkpoint/test_checkpoint.py -k random_damage"),
    Fault("prune_removes_one_too_many", "checkpoint/folder.py", "complete[at + keep :]", "complete[at + keep - 1 :]",
          "tests/checkpoint/test_checkpoint.py -k old_checkpoints"),
    Fault("old_checkpoint_removed_first", "checkpoint/folder.py", "        path.rename(_older(path))",
          "        remove(path)", "tests/checkpoint/test_checkpoint.py -k until_the_new_one"),
    # data
    Fault("a_line_of_a_text_is_a_row", "hf/model/prompts.py", 'sample_by="document"', 'sample_by="line"',
          "tests/train/test_command.py -k text_file"),
    Fault("sharegpt_roles_kept", "train/datasets.py", "_ROLES.get(role, role)", "role",
          "tests/train/test_command.py -k ShareGPT"),
    # ranks
    Fault("silent_rank_not_noticed", "ranks/watch.py", "now - self._beat_at[rank] > self._timeout_s]",
          "now - self._beat_at[rank] > 100 * self._timeout_s]", "tests/ranks/test_watch.py -k without_a_heartbeat"),
    Fault("ranks_with_other_flags_accepted", "comm/agree.py", "len({row[1] for row in rows}) > 1", "False",
          "tests/ranks/test_agreement.py -k by_rank"),
    Fault("batches_of_neighbours_not_compared", "comm/agree.py", "len(known) > 1", "False",
          "tests/hf/test_batches.py -k sixth_forward"),
    Fault("rank_beyond_the_world_accepted", "ranks/job.py", "0 <= rank < world_size",
          "0 <= rank", "tests/ranks/test_agreement.py -k variables"),
    # plan
    Fault("fsdp_bytes_of_all_ranks", "plan/cost/weights.py", "shard_elements(parameters, f, c.mesh.tensor) * (f - 1)",
          "shard_elements(parameters, f, c.mesh.tensor) * f",
          "tests/plan/test_counts.py -k training_step"),
    Fault("ulysses_bytes_of_all_ranks", "plan/layers/messages.py", "rows * (all_packed - packed), of_q",
          "rows * all_packed, of_q", "tests/plan/test_counts.py -k ulysses_attention"),
    Fault("window_costs_its_context", "plan/layers/attended_keys.py", "w * (w + 1) / 2 + (float(n) - w) * w",
          "float(n) * w", "tests/plan/test_plan.py -k count_their_pairs"),
    Fault("returned_gradients_are_free", "plan/layers/attended_keys.py", "gradients = 3 * sides if",
          "gradients = 0 * sides if", "tests/attn/test_live_bytes.py -k packed_documents"),
    Fault("saved_norm_forgotten", "plan/cost/saved.py", "* in_attention, normed + mlp_input * in_mlp",
          "* in_attention, mlp_input * in_mlp", "tests/plan/test_memory.py -k exact"),
    Fault("many_gpus_try_few_options", "plan/memory_options.py", "for few in (True, False) if", "for few in (True,) if",
          "tests/plan/test_memory_options.py -k many_gpus"),
    Fault("elastic_row_predicts_the_next_sample", "elastic/batches.py",
          "labels[starts.to(labels.device)] = IGNORE", "pass", "tests/elastic/test_elastic.py -k equals_one_process"),
    Fault("elastic_idle_rank_trains", "elastic/batches.py", '"labels": nothing + IGNORE', '"labels": nothing',
          "tests/elastic/test_elastic.py -k Bert"),
    Fault("experts_out_of_order", "hf/weights/experts.py", "out_RD[back].view(", "out_RD.view(",
          "tests/hf/test_experts.py -k 'equal_those and Mixtral'"),
    Fault("ranks_of_a_sequence_draw_alike", "hf/forward/random.py", "self.sp.rank.to_bytes(4)", "bytes(4)",
          "tests/trainers/test_trainer.py -k draw_numbers"),
    Fault("neftune_scaled_by_my_tokens", "hf/forward/random.py",
          "alpha * (call.info.local_length / (call.options.noise_tokens or whole)) ** 0.5", "alpha",
          "tests/trainers/test_trainer.py -k draw_numbers"),
    # verify, train, tracing, scoring
    Fault("verify_accepts_ten_times_the_limit", "verify/judge.py", "self.sharded[rank] <= self.limit[rank]",
          "self.sharded[rank] <= 10 * self.limit[rank]", "tests/verify/test_judge.py"),
    Fault("verify_does_not_notice_coarse_products", "verify/judge.py", "float((product - exact).norm() / exact.norm())",
          "0.0 * float((product - exact).norm() / exact.norm())", "tests/verify/test_verify.py -k coarser"),
    Fault("verify_ignores_the_noise_of_the_whole", "verify/judge.py",
          "max(mine, part.elements / total.elements * all_)", "mine * part.elements", "tests/verify/test_judge.py"),
    Fault("trace_hosts_not_aligned", "tracing/record.py", 'float(event["ts"]) + ', 'float(event["ts"]) + 0 * ',
          "tests/tracing/test_tracing.py"),
    # indexed attention
    Fault("index_ties_go_to_the_other_token", "hf/forward/indexed.py",
          "-math.inf).topk(min(self.part.index_topk, N), -1).indices",
          "-math.inf).flip(-1).topk(min(self.part.index_topk, N), -1).indices.neg().add(N - 1)",
          "tests/hf/test_indexed.py -k test_one_process"),
    Fault("index_keys_are_in_the_order_of_the_ranks", "hf/forward/indexed.py", "info.gather(keys_BLD), mask,",
          "__import__('longspan').SequenceSharding(info.sp.mesh, 'contiguous').gather(keys_BLD, 1, info.length), mask,",
          "tests/hf/test_indexed.py -k test_one_process"),
    Fault("index_rows_end_at_the_last_visible_token", "hf/forward/indexed.py",
          "(0, N - seen), value", "(0, 0), value", "tests/hf/test_indexed.py -k test_one_process"),
    Fault("the_indexer_ignores_documents", "hf/forward/indexed.py", "mask, keys_BLD = mask_of(request, info),",
          "mask, keys_BLD = Mask(),", "tests/hf/test_indexed.py -k test_one_process"),
    Fault("blocks_of_index_keys_in_another_order", "hf/forward/indexed.py", "parts.append(self.captured_keys(",
          "parts.insert(0, self.captured_keys(", "tests/hf/test_indexed.py -k test_one_process"),
    Fault("an_indexer_stays_without_queries", "hf/forward/indexed.py", 'del module.__dict__["forward"]', "pass",
          "tests/hf/test_indexed.py -k test_one_process"),
    Fault("chosen_tokens_count_from_each_span", "cache/indexed.py", "chosen_BLT - a + at, local",
          "chosen_BLT - a, local", "tests/hf/test_indexed.py -k test_generated"),
    Fault("an_open_window_forgets_the_window_before_it", "hf/forward/compressed.py",
          "kept = complete - rate if", "kept = complete if", "tests/hf/test_indexed.py -k 'cache and DeepseekV4'"),
    Fault("a_cached_window_lacks_a_token", "hf/forward/compressed.py", "- self.window + 1)", "- self.window + 2)",
          "tests/hf/test_indexed.py -k 'cache and DeepseekV4'"),
    Fault("queries_behind_cached_tokens_choose_as_the_first_ones", "hf/forward/indexed.py", "[(past + a, past + b) for",
          "[(a, b) for", "tests/hf/test_indexed.py -k 'cache and Qwen4'"),
    Fault("a_pool_of_cached_keys_has_new_ones_only", "hf/forward/blocks.py",
          "keys = keys_to_score(info.step, info.cache.layer_cache(self.number), self.number, keys, whole=True)",
          "keys_to_score(info.step, info.cache.layer_cache(self.number), self.number, keys, whole=True)",
          "tests/hf/test_indexed.py -k 'generated_with_pictures and glm5'"),
    Fault("a_rank_counts_the_entries_of_others", "cache/indexed.py", "(seen - a).clamp(0, b - a)",
          "seen.clamp(0, b - a)", "tests/hf/test_indexed.py -k 'cache and DeepseekV4'"),
    Fault("a_query_sees_an_entry_before_its_last_token", "hf/forward/compressed.py",
          "seen_BL = (position_ids + 1) //", "seen_BL = (position_ids + 2) //",
          "tests/hf/test_indexed.py -k 'one_process and DeepseekV4'"),
    Fault("the_last_block_of_keys_is_read_to_its_end", "attn/indexed.py", "(tokens < 0) | (tokens > i)", "tokens < 0",
          "tests/hf/test_indexed.py -k 'one_process and MiniMax'"),
    Fault("entries_are_made_of_each_ranks_tokens", "hf/forward/compressed.py",
          "kv, gate = (info.gather(linear(hidden_BLD)) for",
          "kv, gate = (linear(hidden_BLD).repeat(1, info.sp.size, 1)[:, : info.length] for",
          "tests/hf/test_indexed.py -k 'one_process and DeepseekV4'"),
    Fault("blocks_are_of_tokens_in_the_order_of_the_ranks", "hf/forward/blocks.py", "packed = info.gather(",
          "packed = (lambda x: __import__('longspan').SequenceSharding(info.sp.mesh, 'contiguous').gather(x, 1, N))(",
          "tests/hf/test_indexed.py -k 'one_process and Qwen4'"),
    Fault("what_attention_reads_is_planned_once", "plan/layers/indexed.py", "self.width * (4 + 2 * c.b)",
          "self.width * 4", "tests/attn/test_live_bytes.py -k indexed"),
    Fault("sinks_of_chosen_tokens_get_no_gradient", "attn/indexed.py", "dsinks -= (block.of_sinks * delta).sum((0, 3))",
          "dsinks -= 0 * (block.of_sinks * delta).sum((0, 3))", "tests/hf/test_indexed.py -k test_one_process"),
    Fault("a_key_gets_the_gradient_of_one_query_of_a_block", "attn/indexed.py",
          "dkv_rows.index_add_(0, block.places.flatten(), more.flatten(0, 2))",
          "dkv_rows[block.places.flatten()] += more.flatten(0, 2)", "tests/hf/test_indexed.py -k test_one_process"),
)  # fmt: skip


def planted(fault: Fault, tree: Path) -> str:
    """Return the fault's file in a tree, with the fault.

    Raises:
        FaultNotFound: the text to replace does not occur once.
    """
    path = tree / "src" / "longspan" / fault.file
    if not path.is_file():
        raise FaultNotFound(f"{fault.name}: no src/longspan/{fault.file}; name the file of the line")
    text = path.read_text()
    if (count := text.count(fault.old)) != 1:
        raise FaultNotFound(
            f"{fault.name}: src/longspan/{fault.file} contains {fault.old!r} {count} times instead of once; adapt the "
            "fault in tests/faults.py to the line"
        )
    return text.replace(fault.old, fault.new)


def not_found() -> list[str]:
    """Return the errors of the texts of all faults."""
    wrong = []
    for fault in FAULTS:
        try:
            planted(fault, ROOT)
        except FaultNotFound as error:
            wrong.append(str(error))
    return wrong


def run(tests: str, tree: Path) -> tuple[int, str]:
    """Run tests in a tree; return pytest's exit code and the last lines of the output.

    The tests run in a fork of this process, which has imported the libraries, and ranks are forks of that one.
    """
    output = tree / "output"
    pid = os.fork()
    if pid == 0:
        _run_here(tests, tree, output)
    deadline = time.monotonic() + LIMIT_S
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)  # ranks that hang, too
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code, "\n".join(output.read_text(errors="replace").strip().splitlines()[-5:])


def _run_here(tests: str, tree: Path, output: Path) -> None:
    """Run the tests in this process, which ends."""
    code = 3
    try:
        os.setsid()
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        # Without byte code, as a file that is changed and restored within a second may keep its size and time.
        os.environ |= {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "POOL_START": "fork"}
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(tree), str(tree / "src")]
        for name in list(sys.modules):
            if name.split(".")[0] in ("tests", "longspan"):
                del sys.modules[name]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *shlex.split(tests)]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def import_libraries() -> None:
    """Import the libraries that most tests need, without longspan."""
    from tests.pool import PRELOAD

    for name in PRELOAD:
        if not name.startswith("longspan"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def main() -> int:
    """Run the command; 1 if a fault is unseen."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="plant this one; may be given several times")
    parser.add_argument("--list", action="store_true", help="check that every text is found, and run nothing")
    args = parser.parse_args()
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := set(args.only or ()) - by_name.keys():
        parser.error(f"no fault is named {', '.join(sorted(unknown))}; there are {', '.join(by_name)}")
    wrong = not_found()
    if wrong or args.list:
        print("\n".join(wrong) or f"{len(FAULTS)} faults, each text found once")
        return int(bool(wrong))
    unseen = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, tree / name)
        import_libraries()
        for fault in [by_name[name] for name in args.only or by_name]:
            path, start = tree / "src" / "longspan" / fault.file, time.monotonic()
            before = path.read_text()
            path.write_text(planted(fault, tree))
            code, tail = run(fault.tests, tree)
            path.write_text(before)
            verdict = {0: "UNSEEN", 1: "seen"}.get(code, f"ERROR (pytest's exit code {code})")
            print(f"{fault.name}: {verdict} ({time.monotonic() - start:.0f} s, {fault.tests})", flush=True)
            if code != 1:
                unseen.append(fault.name)
                print("    " + tail.replace("\n", "\n    "), flush=True)
    print(f"unseen: {', '.join(unseen)}" if unseen else "every fault was seen")
    return bool(unseen)


if __name__ == "__main__":
    sys.exit(main())
