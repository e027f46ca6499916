"""Which cases of the long tests `make test` runs; all their other cases are marked slow, for `make test-all`.

A case stays for each thing that can break by itself: a way of conversion, an opset, a precision, a family.
What is slow are further combinations of these, large real models, and children that import everything anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import pytest

STAYS: dict[str, tuple[str, ...]] = {
    # Both ways of conversion, all opsets and both precisions stay, each with one model.
    "frontend/test_conversions.py::test_families_convert_the_plain_way": (
        "gpt2-trace",
        "llama-export",
        "bert-trace",
        "t5-trace",
        "whisper-trace",
        "vit-trace",
    ),
    "frontend/test_conversions.py::test_families_in_fp16": ("gpt2", "vit"),
    "frontend/test_conversions.py::test_lengths_that_vary": ("gpt2-trace",),
    "frontend/test_missing_operations.py::test_each_conversion": (
        "repeating-trace",
        "triangular-trace",
        "scattering-export",
        "elementary-trace",
        "decomposing-trace",
    ),
    "passes/test_converted_masks.py::test_every_spelling": (
        "nanogpt-trace-15-FLOAT32",
        "flash-trace-18-FLOAT16",
        "float-trace-15-FLOAT32",
        "boolean and padding-trace-15-FLOAT32",
        "one product-export-17-FLOAT16",
        "triu-trace-18-FLOAT16",
        "tril-trace-15-FLOAT32",
        "run time-trace-18-FLOAT16",
        "where-trace-15-FLOAT32",
        "window-trace-18-FLOAT16",
        "boolean-trace-15-FLOAT32",
        "sum-trace-18-FLOAT16",
        "or-trace-15-FLOAT32",
        "view-trace-18-FLOAT16",
    ),
    "passes/test_converted_masks.py::test_hugging_face": (
        "eager-alone-trace-15-FLOAT32",
        "eager-padded-trace-18-FLOAT16",
        "sdpa-padded-export-17-FLOAT16",
    ),
    "passes/test_converted_masks.py::test_the_mask_as_an_input": ("nanogpt-15", "boolean and padding-18"),
    "passes/test_pad_models.py::test_converted_models": (
        "trace-15-FLOAT32-gpt",
        "trace-16-FLOAT16-mlp",
        "trace-18-FLOAT32-mlp",
        "export-17-FLOAT16-gpt",
    ),
    "recipes/test_converted_gpt.py::test_embedding_matmul": (
        "trace-15-FLOAT32-input",
        "trace-16-FLOAT16-matmul",
        "trace-18-FLOAT16-input",
        "export-17-FLOAT16-input",
    ),
    "recipes/test_converted_gpt.py::test_select_last_token": (
        "trace-15-FLOAT16-select_last_token",
        "trace-16-FLOAT32-select_last_token(position='input')",
        "trace-18-FLOAT16-select_last_token(position='input')",
        "export-17-FLOAT16-select_last_token",
    ),
    "recipes/test_converted_gpt.py::test_a_gpt_that_selects_by_itself": ("trace-15",),
    "recipes/test_converted_gpt.py::test_both_at_conversion_time": ("15",),
    "recipes/test_recipe_gpt2.py::test_hugging_face_gpt2": ("trace-eager-False-iOS16-fp16",),
    "recipes/test_recipe_gpt2.py::test_nanogpt": ("trace-sdpa-iOS18-fp16",),
    "recipes/test_family_recipes.py::test_nothing_is_lost_and_the_numbers_stay": (
        "decoder_ane-llama-True",
        "whisper_ane-whisper-False",
        "vit_ane-vit-False",
    ),
    "recipes/test_configurations.py::test_a_few_configurations": (
        "mqa_untied",
        "parallel_residual",
        "distance_bias",
        "patches",
        "sound",
    ),
    "recipes/test_configurations.py::test_lookups_of_words_and_casts_of_inputs_alone_stay_off": (
        "counted_positions-1",
    ),
    "passes/test_apply_remedies.py::test_no_share_falls_and_a_second_run_changes_nothing": ("bert-M4+",),
    "passes/test_sequence_layout.py::test_text_encoders_take_it_where_it_was_measured_to_help": (
        "M1/macOS 14-auto",
    ),
    "passes/test_sequence_layout.py::test_nobody_takes_it_elsewhere": (
        "M4/macOS 15-encoder_ane",
        "M1 Pro/macOS 14-auto",
    ),
    "passes/test_sequence_layout.py::test_it_is_undone_where_the_products_would_leave_the_engine": (
        "encoder_ane",
    ),
    "passes/test_sequence_layout.py::test_what_was_measured_counts_more_than_the_estimate_and_is_named": (
        "auto",
    ),
    "passes/test_sequence_layout.py::test_wrong_versions_are_caught": ("norms_of_tokens",),
    "passes/test_sequence_layout.py::test_of_other_kinds_nothing_was_measured": ("vit", "sound"),
    "passes/test_split_heads.py::test_a_layer_has_no_op_more_than_one_written_by_hand": (
        "bert-size0",
        "vit-size1",
        "gpt2-size3",
    ),
    "passes/test_split_heads.py::test_each_edit_of_a_block_is_proved": ("vit-size1", "llama-size4"),
    "passes/test_unroll_recurrent.py::test_each_kind_keeps_its_numbers": (
        "lstm one step",
        "lstm reverse",
        "lstm peephole and clip",
        "gru reverse",
        "gru other activations",
        "rnn",
        "rnn reverse",
    ),
    # Weights in every form stay, in one of the two models; so does what becomes of them when functions part.
    "passes/test_compressed_models.py::test_weights_stay_compressed": (
        "iOS 16: int8, vision",
        "iOS 16: uint8 with zero points, vision",
        "iOS 16: int8 of tensors, text",
        "iOS 16: palette of 4 bits, vision",
        "iOS 16: palette of a function, vision",
        "iOS 16: palette of 8 bits, vision",
        "iOS 16: pruned, vision",
        "iOS 16: pruned n:m, text",
        "iOS 16: thresholds, vision",
        "iOS 18: int4 of blocks, vision",
        "iOS 18: uint4 of blocks, text",
        "iOS 18: int8 with zero points, vision",
        "iOS 18: palette of 3 bits, vision",
        "iOS 18: palettes of groups, vision",
        "iOS 18: palette with scales, vision",
        "iOS 18: pruned, vision",
        "iOS 18: pruned blocks, vision",
        "iOS 18: pruned, palettes, vision",
        "iOS 18: pruned, int8, vision",
        "iOS 18: palettes, int8, vision",
    ),
    "passes/test_compressed_models.py::test_forms_of_an_old_opset_are_merged_taken_out_and_cut": (
        "int8",
        "pruned",
    ),
    # Of real networks one small one stays where it has what the test is about.
    "neuralnetwork/test_network_corpus.py::test_an_upgrade_keeps_numbers_and_description": (
        "custom_swish_mcneural",
        "mlt_es2en_char_decoder16",
        "mlt_gesture_classifier",
        "waifu2x_anime_noise0",
    ),
    "recipes/test_recipe_neuralnetwork.py::test_real_networks": (
        "mlt_es2en_char_decoder16",
        "mlt_gesture_classifier",
    ),
    "recipes/test_recipe_neuralnetwork.py::test_without_the_steps_that_round_all_is_bit_exact": (
        "mlt_es2en_char_decoder16",
        "mlt_gesture_classifier",
        "blazeface_scaled",
    ),
    "passes/test_long_convolution.py::test_real_models_have_no_wide_kernel_left": (
        "silero_unified.mlpackage-1",
    ),
    "passes/test_unroll_loop.py::test_real_models_have_no_loop_left": ("1",),
    "test_surgery.py::test_every_pass_leaves_real_packages_whole": ("anemll_multifunction", "silero_unified"),
    # What the cache of a decoder must keep is tried on each spelling; how often and in how many parts is not.
    "passes/test_add_cache.py::test_200_steps_to_the_end_of_the_context": ("sampler0",),
    "passes/test_add_cache.py::test_chunks_have_a_state_each_and_write_the_same": ("3-3",),
    "interpret/test_looked_up_rows.py::test_rows_are_looked_up": (
        "rows-as many tokens as numbers of a head",
        "rows and a cache-as many tokens as numbers of a head",
        "rows and a shorter cache in inputs-as many tokens as numbers of a head",
        "embeddings-usual",
        "embeddings, rows and a cache-usual",
    ),
    "interpret/test_attentions.py::test_converted_models": ("gpt2-2", "bert-2", "vit-2"),
    "splitting/test_families.py::test_a_limit_is_kept_by_as_few_chunks_as_can_be": ("unet",),
    "splitting/test_splitting.py::test_weights_that_differ_in_one_byte_are_not_shared": ("0", "8191"),
    "commands/test_starting.py::test_ctrl_c_ends_it_whenever_it_comes": ("None", "torch"),
}
"""Test of many cases, by its place in tests/ -> the cases that stay."""

ONE_OF: dict[str, int] = {
    "checking/test_aiming.py::test_one_number_of_all_is_met": 3,
    "files/test_mil_program.py::test_packages_survive_the_text": 3,
    "frontend/test_conversions.py::test_each_conversion_agrees_with_torch": 3,
    "frontend/test_folding.py::test_each_form_agrees_with_torch": 3,
    "interpret/test_conv.py::test_conv_transpose": 7,
    "passes/layers/test_fold_batchnorm.py::test_whole_numbers_stay_the_same_bit_for_bit": 5,
    "passes/layers/test_split_pooling.py::test_maxima_are_bit_exact": 5,
    "passes/layers/test_split_pooling.py::test_windows_inside": 5,
    "passes/layers/test_split_upsampling.py::test_interpolation": 5,
    "passes/layers/test_undilate_convolution.py::test_phases": 3,
    "passes/layers/test_undilate_convolution.py::test_zeros": 5,
    "passes/test_add_cache.py::test_every_spelling_gives_what_it_gave": 5,
    "passes/test_causal_beside_padding.py::test_padding_is_split_off_and_combined_once": 3,
    "passes/test_causal_mask_tensor.py::test_every_spelling_becomes_one_shared_tensor": 3,
    "passes/test_compressed_models.py::test_weights_stay_compressed": 3,
    "passes/test_converted_masks.py::test_every_spelling": 3,
    "passes/test_converted_ranks.py::test_windows_that_cannot_be_converted_otherwise": 5,
    "passes/test_embedding_matmul.py::test_a_guard_goes_when_the_ids_cannot_be_negative": 2,
    "passes/test_embedding_matmul.py::test_every_id_gives_the_very_bits_of_its_row": 5,
    "passes/test_embedding_matmul.py::test_shapes_and_opsets": 5,
    "passes/test_integers_as_floats.py::test_comparisons_with_small_integers_hold_for_every_other_integer": 5,
    "passes/test_long_convolution.py::test_numbers_are_the_same_in_another_order": 5,
    "passes/test_long_convolution.py::test_pieces_give_the_same_numbers": 5,
    "passes/test_pad_edges.py::test_constants_that_broadcast": 5,
    "passes/test_pad_edges.py::test_these_never_see_the_padding": 3,
    "passes/test_select_last_token.py::test_norms_and_heads": 7,
    "passes/test_unroll_recurrent.py::test_what_only_the_gru_of_ios_18_has": 5,
    "recipes/test_converted_gpt.py::test_of_the_guard_of_ids_nothing_is_left": 5,
    "recipes/test_family_recipes.py::test_a_recipe_makes_no_model_slower": 4,
    "recipes/test_never_slower.py::test_two_models": 4,
}
"""Test of many cases that are alike -> of how many of those that would stay one does, evenly spread."""

STANDS_IN: dict[str, str] = {
    "passes/layers/test_fold_layer_constants.py::test_blazeface": "its neighbours",
    "passes/layers/test_legacy_concat.py::test_a_detector_joins_its_anchors_along_rows": "its neighbours",
    "passes/layers/test_legacy_inner_product.py::test_a_real_segmentation_network": "its neighbours",
    "passes/layers/test_legacy_pad.py::test_a_detector_pads_its_channels": "its neighbours",
    "passes/layers/test_legacy_rearrange.py::test_a_real_segmentation_network": "its neighbours",
    "passes/layers/test_legacy_slice.py::test_a_detector_cuts_its_coordinates": "its neighbours",
    "passes/layers/test_legacy_subtract.py::test_a_face_detector": "its neighbours",
    "passes/layers/test_spread_channels.py::test_the_gates_of_a_real_network": "its neighbours",
    "passes/layers/test_split_pooling.py::test_real_networks": "test_maxima_are_bit_exact",
    "passes/layers/test_split_upsampling.py::test_real_networks": "test_interpolation",
    "passes/test_fold_batch_norm.py::test_a_real_network_loses_batch_norms": "its neighbours",
    "passes/test_threshold_to_maximum.py::test_relu6_of_a_real_network_reaches_the_engine": "its neighbours",
    "passes/test_token_id_guard.py::test_auto_takes_the_guard_away_where_the_caller_says_so": "its neighbours",
    "passes/test_unroll_loop.py::test_a_gru_of_torch_is_straight_and_legal": "test_a_scripted_loop_of_torch",
    "passes/test_unroll_recurrent.py::test_a_converted_lstm_agrees_with_torch": (
        "test_each_kind_keeps_its_numbers"
    ),
    "passes/test_sequence_layout.py::test_it_can_be_prevented": "test_nobody_takes_it_elsewhere",
    "passes/test_add_cache.py::test_windows_and_whole_contexts_have_a_state_each": (
        "test_every_spelling_gives_what_it_gave"
    ),
    "recipes/test_recipe_gpt2.py::test_an_untied_head": "test_hugging_face_gpt2",
    "splitting/test_families.py::test_what_the_encoder_heard_passes_to_each_part_of_the_decoder": (
        "test_skip_connections_pass_and_are_reported"
    ),
    "interpret/test_model.py::test_real_packages_run_as_their_programs_do": "its neighbours",
    "faults/test_kills_and_savers.py::test_kills": "test_failing_calls.py",
    "faults/test_kills_and_savers.py::test_savers_at_once": "test_eight_threads_one_target",
}
"""Test that is slow as a whole -> what stands for it in `make test`."""


def mark_slow(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """Mark the cases that do not stay; gives the cases of each test that was collected."""
    cases: dict[str, set[str]] = {}
    stayed: Counter[str] = Counter()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        place = name.removeprefix("tests/")
        cases.setdefault(place, set()).add(case[:-1])
        if place in STANDS_IN or (place in STAYS and case[:-1] not in STAYS[place]):
            item.add_marker(pytest.mark.slow)
            continue
        if item.get_closest_marker("slow") is None:
            if stayed[place] % ONE_OF.get(place, 1):
                item.add_marker(pytest.mark.slow)
            stayed[place] += 1
    return cases


def stale(cases: Mapping[str, Collection[str]]) -> list[str]:
    """Rows that name a test or a case which is not there, of the files whose tests were collected.

    Args:
        cases: Test -> its cases, of whole files.

    Returns:
        The rows, as they are written in the tables.
    """
    files = {place.partition("::")[0] for place in cases}
    rows = [(place, case) for place, stays in STAYS.items() for case in stays]
    rows += [(place, "") for place in (*ONE_OF, *STANDS_IN)]
    return [
        f"{place}[{case}]" if case else place
        for place, case in rows
        if place.partition("::")[0] in files and (place not in cases or (case and case not in cases[place]))
    ]
