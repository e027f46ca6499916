"""Which cases of the long tests `make test` runs; all their other cases are marked slow, for `make test-all`.

A case stays for each thing that can break by itself: a way of conversion, an opset, a precision, a family.
What is slow are further combinations of these, large real models, children that import everything anew, and
what takes seconds where quicker tests would fail with it.
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
    "recipes/test_family_recipes.py::test_nothing_is_lost_and_the_numbers_stay": ("vit_ane-vit-False",),
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
    "passes/test_sequence_layout.py::test_nobody_takes_it_elsewhere": (
        "M4/macOS 15-encoder_ane",
        "M1 Pro/macOS 14-auto",
    ),
    "passes/test_sequence_layout.py::test_it_is_undone_where_the_products_would_leave_the_engine": (
        "encoder_ane",
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
    "passes/test_long_convolution.py::test_real_models_have_no_wide_kernel_left": (
        "silero_unified.mlpackage-1",
    ),
    "test_surgery.py::test_every_pass_leaves_real_packages_whole": ("anemll_multifunction", "silero_unified"),
    # What the cache of a decoder must keep is tried on each spelling; how often and in how many parts is not.
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
    "shipping/test_building.py::test_a_stopped_build_goes_on_to_the_same_bytes": ("converted",),
}
"""Test of many cases, by its place in tests/ -> the cases that stay."""

WAITS: dict[str, tuple[str, ...]] = {
    # Every public call runs in test_public_calls.py; `make dist`, on each push, runs first commands of README.
    "test_docs.py::test_snippets_run_in_order_and_print_what_the_page_says": (
        "README.md",
        "api.md",
        "ci.md",
        "command-line.md",
        "compression.md",
        "decoders.md",
        "large-models.md",
        "sizes.md",
        "tutorial.md",
    ),
    "placement/test_hazards.py::test_the_repair_brings_the_numbers_back": ("small shares of many keys",),
}
"""Test -> its cases of many seconds that are slow; all others stay."""

ONE_OF: dict[str, int] = {
    "checking/test_against_torch.py::test_a_wrong_module_is_the_first": 2,
    "checking/test_against_torch.py::test_a_wrong_module_of_an_exported_program_is_the_first": 3,
    "checking/test_aiming.py::test_one_number_of_all_is_met": 27,
    "checking/test_both.py::test_both_tries_adversarial_inputs": 3,
    "checking/test_hostile_numbers.py::test_the_right_one_keeps_its_grade": 5,
    "checking/test_hostile_numbers.py::test_the_wrong_one_is_caught_at_its_site": 5,
    "checking/test_hostile_numbers.py::test_whole_models_are_told_apart": 5,
    "checking/test_model_proofs.py::test_a_wrong_model_is_not_proved_and_the_op_is_named": 3,
    "checking/test_movers.py::test_another_move_is_caught": 5,
    "checking/test_rounding.py::test_a_variance_of_squares_loses_digits": 6,
    "checking/test_rounding.py::test_what_is_alike_is_subtracted_first": 8,
    "checking/test_stand_ins.py::test_weights_that_are_not_contiguous_are_told_apart": 2,
    "checking/test_trials.py::test_a_wrong_model_is_told_apart": 5,
    "commands/test_app.py::test_bad_usage_is_one_line_and_its_own_exit_code": 5,
    "commands/test_hostile_names.py::test_every_command_prints_them": 3,
    "commands/test_inspecting.py::test_bad_usage_is_a_line_and_its_own_exit_code": 3,
    "commands/test_inspecting.py::test_real_models": 3,
    "commands/test_starting.py::test_ctrl_c_ends_it_whenever_it_comes": 2,
    "commands/test_starting.py::test_light_commands_need_neither_torch_nor_coremltools": 6,
    "commands/test_starting.py::test_options_read_from_a_file_are_those_of_the_class": 5,
    "commands/test_widths.py::test_a_command_prints_no_wider_than_a_terminal": 5,
    "commands/test_widths.py::test_explanations_fit_but_for_words_without_a_place_to_break": 3,
    "compressing/test_activations.py::test_inputs_and_weights_of_8_bits": 3,
    "compressing/test_bias_correction.py::test_the_mean_of_each_channel_stays": 2,
    "compressing/test_cache_codes.py::test_where_it_cannot_be_is_said": 3,
    "compressing/test_compression.py::test_doubtful_samples_are_said": 3,
    "compressing/test_correcting.py::test_a_weight_that_reads_zeros_alone_is_rounded_to_the_nearest": 3,
    "compressing/test_correcting.py::test_what_is_stored_is_what_was_measured": 2,
    "compressing/test_finished.py::test_a_killed_run_goes_on": 5,
    "compressing/test_form_evidence.py::test_no_op_leaves_the_engine": 18,
    "compressing/test_named_forms.py::test_a_form_is_stored_read_back_and_run": 4,
    "compressing/test_named_forms.py::test_without_correction_every_op_loses_more": 4,
    "compressing/test_sensitivity.py::test_a_proposal_is_applied_by_coremltools": 3,
    "compressing/test_sensitivity.py::test_the_cost_is_that_of_the_whole_model_with_the_weight_replaced": 2,
    "compressing/test_sharing.py::test_compression_over_a_cluster_has_the_bytes_of_one_process": 3,
    "examples/test_examples.py::test_the_version_is_the_one_asked_for": 3,
    "facts/test_causal.py::test_pass_inspection_and_decoder_agree": 4,
    "facts/test_loop_rounds.py::test_what_never_ends_or_is_unknown_is_not_counted": 5,
    "faults/test_changing_sources.py::test_a_source_that_changes": 3,
    "faults/test_each_writer.py::test_a_writer_under_a_fault": 2,
    "faults/test_failing_calls.py::test_a_call_that_fails": 2,
    "faults/test_failing_calls.py::test_copies_that_come_short": 3,
    "faults/test_failing_calls.py::test_other_ends_of_a_save": 2,
    "faults/test_killed_chains.py::test_a_killed_writer_leaves_what_was_there": 4,
    "files/test_compiled.py::test_twins_give_the_same_bits": 3,
    "files/test_compiled.py::test_without_coremldata_the_interface_comes_from_the_metadata": 2,
    "files/test_mil_program.py::test_converted_models_survive_the_text": 4,
    "files/test_mil_program.py::test_packages_survive_the_text": 9,
    "files/test_package.py::test_coremltools_reads_what_was_written": 2,
    "files/test_package.py::test_real_packages_survive": 3,
    "frontend/test_conversions.py::test_dense_experts_are_those_that_transformers_chooses": 3,
    "frontend/test_conversions.py::test_each_conversion_agrees_with_torch": 114,
    "frontend/test_conversions.py::test_families_convert_the_plain_way": 6,
    "frontend/test_conversions.py::test_what_is_not_covered_is_refused_by_name": 3,
    "frontend/test_exported_rnns.py::test_outputs_and_last_states": 2,
    "frontend/test_fast_attention.py::test_it_gives_what_torch_gives": 9,
    "frontend/test_folding.py::test_each_form_agrees_with_torch": 9,
    "frontend/test_ignored_arguments.py::test_each_argument_counts": 2,
    "frontend/test_length_choices.py::test_the_length_from_which_on_the_choice_is_another": 3,
    "frontend/test_length_choices.py::test_what_is_right_for_every_text_is_converted": 2,
    "frontend/test_missing_axes.py::test_each_agrees_with_torch": 2,
    "frontend/test_missing_operations.py::test_each_conversion": 3,
    "frontend/test_missing_operations.py::test_what_is_not_covered_is_refused_by_name": 3,
    "frontend/test_strided_views.py::test_each_window_agrees_with_torch": 2,
    "frontend/test_strided_views.py::test_what_is_not_covered_is_refused": 3,
    "frontend/test_traceable.py::test_other_rows_than_those_of_the_trace": 3,
    "frontend/test_written_slices.py::test_each_write_agrees_with_torch": 9,
    "frontend/test_written_slices.py::test_slices_that_are_written_are_joined_and_not_scattered": 2,
    "fuzz/test_structure.py::test_what_is_planted_is_noticed": 2,
    "interpret/test_attentions.py::test_converted_models": 3,
    "interpret/test_conv.py::test_averages_that_round_up_count_what_lies_beyond_as_padding": 2,
    "interpret/test_conv.py::test_conv": 4,
    "interpret/test_conv.py::test_conv_transpose": 21,
    "interpret/test_conv.py::test_pooling": 3,
    "interpret/test_conv.py::test_pooling_that_rounds_up": 6,
    "interpret/test_core.py::test_real_packages_run_the_same_every_time": 3,
    "interpret/test_crops.py::test_crop_resize_of_every_image": 4,
    "interpret/test_crops.py::test_resample": 5,
    "interpret/test_decisions.py::test_non_maximum_suppression": 3,
    "interpret/test_decoding.py::test_beyond_the_context_positions_begin_anew": 4,
    "interpret/test_decoding.py::test_of_a_prompt_beyond_the_context_the_last_tokens_are_read": 4,
    "interpret/test_decoding.py::test_prompts_of_every_length_are_read_as_the_whole_model_reads_them": 6,
    "interpret/test_decoding.py::test_prompts_that_hold_no_tokens": 3,
    "interpret/test_decoding.py::test_the_coldest_samplers_take_the_likeliest": 2,
    "interpret/test_decoding.py::test_the_whole_model_is_compared_with_one_that_gives_its_last_token": 4,
    "interpret/test_image.py::test_resize": 2,
    "interpret/test_image.py::test_what_coremltools_tests_expect": 2,
    "interpret/test_looked_up_rows.py::test_rows_are_looked_up": 6,
    "interpret/test_more.py::test_scatter_one_slice_after_the_other": 2,
    "interpret/test_recurrent.py::test_gru_as_documented": 5,
    "interpret/test_recurrent.py::test_lstm_as_documented": 5,
    "interpret/test_sampled_inputs.py::test_sizes_are_those_of_the_description": 2,
    "network_editing/test_upgraded_scores.py::test_an_upgrade_keeps_what_can_run_on_the_ane": 2,
    "network_editing/test_upgraded_scores.py::test_auto_raises_for_no_healthy_network": 3,
    "neuralnetwork/test_network_bad_input.py::test_a_bad_network_in_a_pipeline_is_named": 5,
    "neuralnetwork/test_network_bad_input.py::test_a_bad_network_is_refused_with_one_clear_error": 2,
    "neuralnetwork/test_network_bad_input.py::test_the_command_line_says_it_in_a_line": 2,
    "neuralnetwork/test_network_bad_layers.py::test_empty_parameters_are_taken_or_refused_by_name": 10,
    "neuralnetwork/test_network_corpus.py::test_an_upgrade_keeps_numbers_and_description": 2,
    "neuralnetwork/test_network_layers.py::test_arithmetic": 3,
    "neuralnetwork/test_network_ranks.py::test_layers_after_a_squeeze_count_four_axes": 5,
    "neuralnetwork/test_network_ranks.py::test_layers_after_old_ones_count_five_axes": 5,
    "neuralnetwork/test_network_recurrent.py::test_lstm_follows_its_equations": 5,
    "neuralnetwork/test_network_reductions.py::test_reductions": 3,
    "neuralnetwork/test_network_shapes.py::test_axes_of_the_rank_5_mapping_count_the_sequence": 3,
    "neuralnetwork/test_network_shapes.py::test_shapes_may_be_dynamic": 2,
    "neuralnetwork/test_network_weights.py::test_what_coremltools_quantizes_is_decoded_as_it_does": 5,
    "passes/layers/test_fold_batchnorm.py::test_whole_numbers_stay_the_same_bit_for_bit": 45,
    "passes/layers/test_fuse_clip.py::test_a_network_that_has_newer_layers_gets_a_clip": 3,
    "passes/layers/test_fuse_clip.py::test_lower_bounds_are_one_layer": 4,
    "passes/layers/test_fuse_clip.py::test_the_version_stays": 3,
    "passes/layers/test_fuse_clip.py::test_upper_bounds_are_a_clip_or_two_layers": 2,
    "passes/layers/test_fuse_linear.py::test_rows_that_round_as_one": 4,
    "passes/layers/test_fuse_linear.py::test_weights_take_a_factor": 15,
    "passes/layers/test_layer_passes.py::test_the_example_keeps_its_numbers": 5,
    "passes/layers/test_layer_passes.py::test_the_sketch_is_true_and_each_site_is_checked": 5,
    "passes/layers/test_legacy_clip.py::test_a_constant_gets_the_batch_of_the_other_side": 4,
    "passes/layers/test_legacy_clip.py::test_bounds_that_stand_alone": 2,
    "passes/layers/test_legacy_clip.py::test_two_bounds_are_a_clip": 2,
    "passes/layers/test_legacy_divide.py::test_computed_divisors": 3,
    "passes/layers/test_legacy_divide.py::test_other_constants_are_rounded_once_more": 3,
    "passes/layers/test_legacy_divide.py::test_powers_of_two_are_exact": 2,
    "passes/layers/test_legacy_embedding.py::test_shapes": 3,
    "passes/layers/test_legacy_gather.py::test_indices": 3,
    "passes/layers/test_legacy_pad.py::test_amounts": 5,
    "passes/layers/test_legacy_power.py::test_rank_5_and_an_unknown_batch": 2,
    "passes/layers/test_legacy_power.py::test_whole_exponents_are_products": 2,
    "passes/layers/test_legacy_rearrange.py::test_rows": 3,
    "passes/layers/test_legacy_slice.py::test_what_stays": 2,
    "passes/layers/test_split_pooling.py::test_maxima_are_bit_exact": 60,
    "passes/layers/test_split_pooling.py::test_other_paddings_of_maxima": 10,
    "passes/layers/test_split_pooling.py::test_windows_inside": 20,
    "passes/layers/test_split_upsampling.py::test_dynamic_sizes": 2,
    "passes/layers/test_split_upsampling.py::test_interpolation": 100,
    "passes/layers/test_split_upsampling.py::test_interpolation_from_corner_to_corner": 9,
    "passes/layers/test_split_upsampling.py::test_interpolation_is_bit_exact_where_fp32_holds_it": 3,
    "passes/layers/test_split_upsampling.py::test_the_nearest_pixel_is_bit_exact": 5,
    "passes/layers/test_undilate_convolution.py::test_phases": 18,
    "passes/layers/test_undilate_convolution.py::test_zeros": 30,
    "passes/test_absorb_transpose.py::test_the_transpose_goes": 3,
    "passes/test_adapt_rank.py::test_the_numbers_stay": 2,
    "passes/test_add_cache.py::test_a_ring_that_is_too_small_would_be_found": 2,
    "passes/test_add_cache.py::test_a_window_is_kept_in_a_ring": 6,
    "passes/test_add_cache.py::test_every_spelling_gives_what_it_gave": 20,
    "passes/test_add_cache.py::test_prompts_of_any_length": 6,
    "passes/test_apply_remedies.py::test_fp16_that_ruins_an_output_is_not_kept": 2,
    "passes/test_approximate.py::test_each_formula_stays_within_what_it_states": 5,
    "passes/test_argmax_as_floats.py::test_of_equal_numbers_the_first_counts": 9,
    "passes/test_cache_contexts.py::test_the_smallest_that_fits_gives_what_the_whole_gives": 6,
    "passes/test_cache_lookbacks.py::test_it_gives_what_it_gave": 21,
    "passes/test_causal_beside_padding.py::test_fused_attention_gets_the_tensor_as_its_mask": 9,
    "passes/test_causal_beside_padding.py::test_padding_is_split_off_and_combined_once": 9,
    "passes/test_causal_beside_padding.py::test_rows_that_keep_nothing_stay_defined": 3,
    "passes/test_causal_mask_tensor.py::test_every_spelling_becomes_one_shared_tensor": 24,
    "passes/test_causal_masks_shared.py::test_the_mask_as_an_input": 5,
    "passes/test_centre_variance.py::test_every_spelling": 5,
    "passes/test_chain_pools.py::test_averages_of_any_window_are_proved": 5,
    "passes/test_chain_pools.py::test_numbers_are_kept": 3,
    "passes/test_chain_pools.py::test_the_first_pool_sees_the_edges": 3,
    "passes/test_channels_first.py::test_a_block_of_a_transformer": 6,
    "passes/test_compressed_models.py::test_weights_stay_compressed": 18,
    "passes/test_compute_fp16.py::test_masks_of_the_least_number_of_fp32_are_computed_in_fp16": 2,
    "passes/test_converted_masks.py::test_every_spelling": 15,
    "passes/test_converted_masks.py::test_in_fp16_arithmetic": 4,
    "passes/test_converted_masks.py::test_the_mask_as_an_input": 2,
    "passes/test_converted_ranks.py::test_operands_of_one_rank": 9,
    "passes/test_converted_ranks.py::test_packages_of_others_keep_their_numbers": 4,
    "passes/test_converted_ranks.py::test_the_legacy_form": 9,
    "passes/test_converted_ranks.py::test_windows_that_cannot_be_converted_otherwise": 20,
    "passes/test_decompose_attention.py::test_a_scale_that_fp16_rounds_is_made_of_two": 2,
    "passes/test_decompose_ops.py::test_each_form_keeps_the_numbers": 5,
    "passes/test_decompose_ops.py::test_one_hot_rows": 2,
    "passes/test_depthwise_sum.py::test_numbers_are_kept": 2,
    "passes/test_dilated_convolution.py::test_the_image_itself_is_convolved": 2,
    "passes/test_embedding_matmul.py::test_a_guard_goes_when_the_ids_cannot_be_negative": 10,
    "passes/test_embedding_matmul.py::test_a_tied_head_keeps_sharing_the_table": 2,
    "passes/test_embedding_matmul.py::test_every_id_gives_the_very_bits_of_its_row": 15,
    "passes/test_embedding_matmul.py::test_shapes_and_opsets": 20,
    "passes/test_embedding_matmul.py::test_the_default_pipeline_brings_no_gather_back": 3,
    "passes/test_explicit_broadcast.py::test_every_op_on_either_side": 5,
    "passes/test_explicit_broadcast.py::test_integers_stay_integers": 2,
    "passes/test_flat_gather.py::test_the_numbers_stay": 7,
    "passes/test_fold_batch_norm.py::test_numbers_are_kept": 3,
    "passes/test_fold_long_axis.py::test_convolutions_read_the_rows_beside": 2,
    "passes/test_fold_long_axis.py::test_ops_that_work_on_rows": 2,
    "passes/test_fuse_exponential.py::test_is_named_and_repaired": 3,
    "passes/test_fuse_exponential.py::test_logarithms_of_shares": 3,
    "passes/test_fuse_exponential.py::test_the_default_guard_of_a_logarithm_guards_nothing": 5,
    "passes/test_fuse_exponential.py::test_the_form_that_keeps_digits": 5,
    "passes/test_group_by_unit.py::test_it_never_stands_worse_and_a_second_run_changes_nothing": 3,
    "passes/test_group_norm.py::test_a_converted_group_norm": 3,
    "passes/test_integers_as_floats.py::test_comparisons_with_small_integers_hold_for_every_other_integer": 30,
    "passes/test_integers_as_floats.py::test_what_else_is_done_to_integers": 5,
    "passes/test_integers_as_floats.py::test_what_is_made_of_inputs_stays_on_request": 2,
    "passes/test_long_convolution.py::test_numbers_are_the_same_in_another_order": 40,
    "passes/test_long_convolution.py::test_only_the_input_is_too_long": 2,
    "passes/test_long_convolution.py::test_pieces_give_the_same_numbers": 10,
    "passes/test_masked_write.py::test_every_place": 4,
    "passes/test_masks_of_two_kinds.py::test_what_was_nan_is_what_fp32_gives": 2,
    "passes/test_mean_of_means.py::test_axis_by_axis": 3,
    "passes/test_mean_quotient.py::test_the_quotient_is_right_in_fp16_and_was_not": 4,
    "passes/test_negate_subtract.py::test_constants": 3,
    "passes/test_negate_subtract.py::test_dynamic_values": 3,
    "passes/test_one_hot_lookup.py::test_the_rows_that_are_taken_are_the_same": 3,
    "passes/test_pad_edges.py::test_constants_that_broadcast": 15,
    "passes/test_pad_edges.py::test_dynamic_values_that_broadcast": 3,
    "passes/test_pad_edges.py::test_no_infinity_or_nan_meets_a_zero_weight": 3,
    "passes/test_pad_edges.py::test_these_never_see_the_padding": 12,
    "passes/test_pad_last_axis.py::test_matmul_and_its_flag": 2,
    "passes/test_pad_last_axis.py::test_the_multiple_is_an_option": 3,
    "passes/test_pad_models.py::test_converted_models": 4,
    "passes/test_pick_tokens.py::test_a_decoder_writes_what_it_wrote": 4,
    "passes/test_pick_tokens.py::test_the_whole_chain_is_compared": 2,
    "passes/test_position_function.py::test_every_spelling_gives_what_it_gave": 16,
    "passes/test_replace_scatter.py::test_a_dynamic_row": 5,
    "passes/test_replace_scatter.py::test_constant_rows": 5,
    "passes/test_rerank.py::test_rank_four_of_lower_ranks": 5,
    "passes/test_resample_matmul.py::test_the_product_makes_the_same_pixels": 3,
    "passes/test_rms_norm.py::test_every_spelling_and_size": 3,
    "passes/test_rotary_tables.py::test_rows_of_positions": 3,
    "passes/test_scale_cosines.py::test_every_form_and_size": 3,
    "passes/test_scale_ranges.py::test_a_gemma_like_block_is_finite": 2,
    "passes/test_scale_roots.py::test_every_form_and_size": 4,
    "passes/test_scale_roots.py::test_logarithms": 2,
    "passes/test_scale_roots.py::test_nothing_is_lost_where_no_square_overflows": 2,
    "passes/test_scale_spectra.py::test_every_form_and_size": 23,
    "passes/test_select_last_token.py::test_norms_and_heads": 7,
    "passes/test_sequence_layout.py::test_nobody_takes_it_elsewhere": 2,
    "passes/test_split_conv3d.py::test_the_numbers_stay": 3,
    "passes/test_split_heads.py::test_a_layer_has_no_op_more_than_one_written_by_hand": 4,
    "passes/test_split_heads.py::test_each_edit_of_a_block_is_proved": 2,
    "passes/test_split_heads.py::test_masks_of_every_shape": 3,
    "passes/test_subpixel_convolution.py::test_numbers_are_kept": 3,
    "passes/test_unroll_recurrent.py::test_each_kind_keeps_its_numbers": 3,
    "passes/test_unroll_recurrent.py::test_real_models_have_no_recurrent_op_left": 2,
    "passes/test_unroll_recurrent.py::test_what_only_the_gru_of_ios_18_has": 15,
    "placement/test_calibration.py::test_files_that_tell_nothing_are_refused": 6,
    "placement/test_findings.py::test_the_remedy_repairs_it": 36,
    "placement/test_flexible.py::test_each_enumerated_shape_is_counted": 3,
    "placement/test_flexible.py::test_images_of_many_sizes_are_judged_alike_however_they_are_given": 2,
    "placement/test_flexible.py::test_the_default_shape_is_judged_in_memory_and_from_a_path": 4,
    "placement/test_hazards.py::test_safe_numbers_repairs_it_and_leaves_no_finding": 9,
    "placement/test_network_rules.py::test_real_networks": 9,
    "placement/test_reports.py::test_an_inspection_agrees_with_the_report_or_does_not_know": 20,
    "placement/test_reports.py::test_what_can_be_known_is_said": 9,
    "placement/test_statements.py::test_a_statement_is_not_contradicted": 10,
    "placement/test_whole_model.py::test_what_is_known_of_the_whole_reaches_the_ops": 3,
    "recipes/test_configurations.py::test_a_few_configurations": 6,
    "recipes/test_converted_gpt.py::test_embedding_matmul": 2,
    "recipes/test_converted_gpt.py::test_select_last_token": 2,
    "recipes/test_family_recipes.py::test_a_family_s_recipe_repairs_what_costs_no_time": 3,
    "recipes/test_family_recipes.py::test_models_of_another_family_are_refused": 6,
    "recipes/test_never_slower.py::test_two_models": 12,
    "recipes/test_recipe_neuralnetwork.py::test_real_networks": 2,
    "regions/test_compressed_weights.py::test_an_edited_weight_stays_compressed_and_decodes_to_the_edit": 8,
    "regions/test_frequencies.py::test_static_frequencies_are_let_be": 3,
    "regions/test_recurrent_work.py::test_a_recurrent_op_computes_what_its_steps_do": 4,
    "rewriting/test_literals.py::test_a_strangers_pass_runs_in_a_conversion": 3,
    "rewriting/test_literals.py::test_a_strangers_pass_runs_on_both_types": 3,
    "rewriting/test_nesting.py::test_twice_as_deep_costs_twice_as_much": 6,
    "semantics/test_intervals.py::test_what_is_made_lies_in_the_interval": 3,
    "shipping/test_building.py::test_bad_checkpoints_are_errors_in_words": 4,
    "shipping/test_lengthened.py::test_each_size_is_the_model_built_at_it": 28,
    "shipping/test_padded_attention.py::test_masks_in_every_spelling": 9,
    "shipping/test_padding.py::test_every_length_is_what_the_model_gives_at_it": 9,
    "shipping/test_padding.py::test_what_reads_across_is_refused": 2,
    "shipping/test_padding.py::test_windows_that_move_further_pad_multiples": 2,
    "shipping/test_recurrent_decoders.py::test_steps_give_the_logits_of_the_whole_text": 6,
    "shipping/test_resampled_tables.py::test_small_models_compute_their_positions": 2,
    "shipping/test_several_sizes.py::test_each_size_is_the_model_at_that_size": 2,
    "shipping/test_sized_models.py::test_small_models_at_six_sizes": 2,
    "show/test_certificate_page.py::test_a_browser_unfolds_an_op_and_nothing_is_cut": 2,
    "show/test_page.py::test_every_page_is_whole_and_needs_no_other_file": 9,
    "splitting/test_network_chunks.py::test_chunks_of_a_network_are_networks_that_together_equal_it": 6,
    "splitting/test_random_graphs.py::test_a_random_graph_is_cut_as_brute_force_would": 4,
    "splitting/test_splitting.py::test_a_chain_is_proved_against_the_whole": 2,
    "splitting/test_splitting.py::test_a_damaged_manifest_is_an_error": 3,
    "splitting/test_splitting.py::test_as_few_chunks_as_the_limit_needs": 2,
    "splitting/test_splitting.py::test_weights_that_differ_in_one_byte_are_not_shared": 2,
    "test_forks.py::test_a_child_uses_the_library": 2,
    "test_surgery.py::test_an_empty_recipe_changes_nothing": 3,
    "test_surgery.py::test_every_pass_leaves_real_packages_whole": 2,
    "test_threads.py::test_eight_threads_give_what_one_gives": 4,
    "test_threads.py::test_every_door_waits_for_the_lock": 3,
}
"""Test whose cases together take half a second or more -> of how many of those that would stay one does.

They are evenly spread; a defect that only another case shows is found the next night.
"""

STANDS_IN: dict[str, str] = {
    "splitting/test_splitting.py::test_a_real_model_with_labels_is_equal_in_chunks": "its neighbours",
    "passes/test_chain_pools.py::test_the_pools_of_a_real_network_are_legal": "its neighbours",
    "passes/test_remove_identity.py::test_a_real_style_transfer_loses_its_identities": "its neighbours",
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
    "commands/test_reviewing.py::test_the_script_of_the_action_fails_with_the_table_in_the_summary": (
        "its neighbours"
    ),
    "files/test_writing.py::test_temporary_packages_are_for_their_owner_and_go_with_the_process": (
        "its neighbours"
    ),
    "test_templates.py::test_the_tests_of_all_passes_hold_for_it": (
        "test_the_registry_inspect_and_the_command_line_find_it"
    ),
    "shipping/test_building.py::test_stages_of_other_options_are_made_again": (
        "test_a_stopped_build_goes_on_to_the_same_bytes"
    ),
    "shipping/test_sized_models.py::test_a_bert_is_stored_once": "test_small_models_at_six_sizes",
    "files/test_fuzz.py::test_ten_damaged_compiled_models": "files/test_damaged.py",
    "files/test_fuzz.py::test_the_fuzzer_notices_an_error_of_somebody_else": "files/test_damaged.py",
    "network_editing/test_upgraded_scores.py::test_what_nobody_knows_is_no_reason_to_leave_the_layers": (
        "its neighbours"
    ),
    "commands/test_app.py::test_no_progress_bar_without_a_terminal": "its neighbours",
    "passes/test_add_cache.py::test_chunks_have_a_state_each_and_write_the_same": (
        "splitting/test_splitting.py::test_a_chain_on_disk_is_one_model"
    ),
    "shipping/test_building.py::test_a_prompt_of_every_length_gives_the_logits_of_the_checkpoint": (
        "interpret/test_decoding.py::test_prompts_of_every_length_are_read_as_the_whole_model_reads_them"
    ),
    "shipping/test_building.py::test_chunks_write_the_same": (
        "splitting/test_splitting.py::test_a_chain_on_disk_is_one_model"
    ),
    "shipping/test_building.py::test_a_tied_table_that_two_chunks_store_is_said": "its neighbours",
    "shipping/test_building.py::test_experts_that_are_chosen_by_groups_are_built": (
        "frontend/test_conversions.py::test_dense_experts_are_those_that_transformers_chooses"
    ),
    "test_surgery.py::test_the_model_leaves_nothing_behind": "its neighbours",
    "passes/test_apply_remedies.py::test_masks_without_inputs_are_folded": "its neighbours",
    "test_threads.py::test_threads_may_be_the_first_to_import": "its neighbours",
    "test_forks.py::test_a_child_that_ends_takes_nothing_along": "test_a_child_uses_the_library",
    "test_public_calls.py::test_the_recipe_is_no_module_though_its_former_module_is_imported_first": (
        "its neighbours"
    ),
    "files/test_source.py::test_a_source_that_is_cut_short_in_mid_save_ends_the_save": "its neighbours",
    "frontend/test_conversions.py::test_registering_twice_is_harmless_and_leaves_the_hosts_own_alone": (
        "its neighbours"
    ),
    "files/test_package.py::test_a_kill_in_mid_save_leaves_what_was_there": "faults/test_killed_chains.py",
    "recipes/test_recipe_neuralnetwork.py::test_nothing_to_do_gives_the_same_bytes": "its neighbours",
    "placement/test_fitting.py::test_rows_that_were_left_out_are_near": "its neighbours",
    "shipping/test_padded_attention.py::test_a_decoder_at_every_length": (
        "test_an_encoder_with_a_mask_at_every_length"
    ),
    "passes/test_apply_remedies.py::test_casts_at_the_ends_go_where_the_target_pays_for_them": "its neighbours",
    "checking/test_rounding.py::test_another_order_of_a_sum_that_cancels": "its neighbours",
    "recipes/test_recipe_llm.py::test_with_an_attention_mask": "test_a_converted_model",
    "passes/test_cache_contexts.py::test_weights_are_stored_once": (
        "passes/test_position_function.py::test_a_package_writes_the_same_and_shares_its_weights"
    ),
    "passes/test_long_convolution.py::test_the_positions_of_a_speech_encoder_of_real_width_are_on_the_engine": (
        "its neighbours"
    ),
    "passes/test_unroll_loop.py::test_real_models_have_no_loop_left": "its neighbours",
    "passes/test_sequence_layout.py::test_what_was_measured_counts_more_than_the_estimate_and_is_named": (
        "test_wrong_versions_are_caught"
    ),
    "passes/test_rotary_tables.py::test_many_positions_have_two_digits": "its neighbours",
    "recipes/test_recipe_gpt2.py::test_nanogpt": "test_hugging_face_gpt2",
    "passes/test_replace_rare_ops.py::test_a_transposed_convolution_that_is_cropped_stays_on_the_engine": (
        "its neighbours"
    ),
    "frontend/test_conversions.py::test_lengths_that_vary": "test_families_convert_the_plain_way",
    "passes/test_masked_write.py::test_a_decoder_writes_what_it_wrote": (
        "passes/test_pad_state.py::test_a_decoder_writes_what_it_wrote"
    ),
    "passes/test_io_as_cache.py::test_a_decoder_writes_what_it_wrote": (
        "passes/test_cache_as_io.py::test_a_decoder_writes_what_it_wrote"
    ),
    "fuzz/test_structure.py::test_a_few_wrong_structures": (
        "fuzz/test_structure.py::test_what_is_planted_is_noticed"
    ),
    "passes/test_add_cache.py::test_200_steps_to_the_end_of_the_context": "its neighbours",
    "checking/test_rounding.py::test_an_integer_may_follow_what_is_rounded": "its neighbours",
    "placement/test_hazards.py::test_the_page_says_what_a_run_gives": "test_the_repair_brings_the_numbers_back",
    "placement/test_fitting.py::test_bands_that_are_too_narrow_or_too_wide_are_seen": "its neighbours",
    "placement/test_calibration.py::test_what_changed_is_said_as_data": (
        "test_calibrate_writes_a_table_that_inspect_uses"
    ),
    "placement/test_findings.py::test_a_converted_decoder": "its neighbours",
    "placement/test_accuracy.py::test_measured_placements": "placement/test_reports.py",
    "placement/test_memory.py::test_saving_a_converted_model_guards_it_twice": (
        "test_saving_through_the_host_changes_it"
    ),
    "files/test_fuzz.py::test_forty_damaged_files": "files/test_damaged.py",
    "files/test_fuzz.py::test_the_models_are_whole_before": "files/test_damaged.py",
    "commands/test_app.py::test_importing_prints_nothing": "test_list_needs_neither_coremltools_nor_torch",
    "compressing/test_sharing.py::test_weights_with_the_same_inputs_are_worked_on_together": (
        "test_compression_over_a_cluster_has_the_bytes_of_one_process"
    ),
    "compressing/test_estimating.py::test_weights_take_the_bytes_that_are_asked_for": (
        "test_the_bytes_of_a_grid_are_those_of_its_form"
    ),
    "compressing/test_cache_codes.py::test_the_command": "test_it_is_saved_and_read_by_coremltools_and_writes",
    "compressing/test_finished.py::test_other_settings_take_nothing_from_the_folder": (
        "test_a_killed_run_goes_on"
    ),
    "compressing/test_compression.py::test_bits_are_given_where_they_cost_least": (
        "compressing/test_estimating.py"
    ),
    "checking/test_against_torch.py::test_one_of_200_modules_is_the_first": "test_a_wrong_module_is_the_first",
    "checking/test_against_torch.py::test_an_exported_program_has_the_calls_of_its_module": (
        "test_a_wrong_module_of_an_exported_program_is_the_first"
    ),
    "checking/test_against_torch.py::test_an_exported_program_stays_as_it_is": "its neighbours",
    "checking/test_rounding.py::test_numbers_that_have_no_neighbours_excuse_rounding_all_the_same": (
        "test_rounding_of_sums_that_cancel_is_no_difference"
    ),
    "examples/test_examples.py::test_the_same_name_gives_the_same_bytes": "files/test_writing.py",
    "faults/test_failing_calls.py::test_signals_at_any_call": "test_a_call_that_fails",
    "recipes/test_recipe_neuralnetwork.py::test_without_the_steps_that_round_all_is_bit_exact": (
        "its neighbours"
    ),
    "recipes/test_family_recipes.py::test_a_recipe_makes_no_model_slower": "recipes/test_never_slower.py",
    "recipes/test_family_recipes.py::test_of_a_decoder_the_lookup_alone_stays_off": (
        "recipes/test_recipe_llm.py"
    ),
    "recipes/test_recipe_gpt2.py::test_stable_under_coremltools_own_passes": (
        "test_in_the_middle_of_a_conversion"
    ),
    "recipes/test_kinds_of_models.py::test_wide_kernels_reach_the_engine_for_a_few_ops_more": (
        "passes/test_long_convolution.py"
    ),
    "recipes/test_recipe_llm.py::test_it_keeps_the_cache_on_every_target": "test_a_converted_model",
    "recipes/test_converted_gpt.py::test_of_the_guard_of_ids_nothing_is_left": (
        "passes/test_embedding_matmul.py"
    ),
    "frontend/test_conversions.py::test_with_a_cache_in_the_graph": "test_families_convert_the_plain_way",
    "files/test_mil_program.py::test_weights_without_a_file_are_written_out": "test_packages_survive_the_text",
    "interpret/test_core.py::test_a_real_network_agrees_with_its_original": (
        "neuralnetwork/test_network_corpus.py"
    ),
    "interpret/test_looked_up_rows.py::test_a_missing_table_is_an_error_in_words": "its neighbours",
    "interpret/test_decoding.py::test_a_text_has_no_end_where_old_tokens_are_forgotten": (
        "test_beyond_the_context_positions_begin_anew"
    ),
    "splitting/test_families.py::test_one_hidden_state_passes_between_the_layers_of_a_decoder": (
        "test_skip_connections_pass_and_are_reported"
    ),
    "test_notebooks.py::test_notebooks_run": "test_the_demonstration",
    "rewriting/test_gate.py::test_an_unrolled_recurrence_is_not_free": "its neighbours",
    "rewriting/test_nesting.py::test_files": "its neighbours",
    "rewriting/test_nesting.py::test_values_that_are_read_twice": "its neighbours",
    "show/test_compression_page.py::test_the_command_writes_them": "test_the_page_says_what_the_report_says",
    "show/test_compression_page.py::test_the_plot_holds_every_point": "test_the_page_says_what_the_report_says",
    "checking/test_rounding.py::test_no_element_excuses_another_one": (
        "test_a_wrong_rewrite_smaller_than_the_rounding_is_caught"
    ),
    "compressing/test_estimating.py::test_weights_that_count_alike_get_the_same": (
        "test_weights_that_count_most_get_more_bits_at_the_same_size"
    ),
    "compressing/test_sharing.py::test_the_commands_take_a_folder": "test_the_models_of_a_folder",
    "files/test_compiled.py::test_the_command_line_compares_the_mil_texts": "its neighbours",
    "files/test_set_aside.py::test_what_is_on_the_disk_changes_no_weight": "its neighbours",
    "passes/layers/test_legacy_rearrange.py::test_random_rows_keep_their_numbers": "test_rows",
    "passes/layers/test_legacy_gather.py::test_random_indices": "test_indices",
    "interpret/test_decoding.py::test_a_short_prompt_costs_one_call_where_an_input_picks_the_row": (
        "its neighbours"
    ),
    "passes/test_add_cache.py::test_converted_models": "recipes/test_recipe_llm.py::test_a_converted_model",
    "passes/test_add_cache.py::test_a_program_that_was_never_saved_is_saved": (
        "test_what_is_shared_is_written_once"
    ),
    "passes/test_add_cache.py::test_one_state_for_all_layers_cannot_be_cut": (
        "splitting/test_families.py::test_a_state_that_all_layers_share_keeps_them_together"
    ),
    "passes/test_apply_remedies.py::test_a_decoder_is_repaired_and_checked": "its neighbours",
    "regions/test_reencoding.py::test_many_numbers_are_found_by_means_of_near_ones": (
        "test_very_many_numbers_are_counted_by_what_they_are_near"
    ),
    "rewriting/test_nesting.py::test_applying_is_not_exponential": "test_twice_as_deep_costs_twice_as_much",
    "network_editing/test_upgraded_scores.py::test_pixels_are_checked_as_pixels": "its neighbours",
    "passes/test_cache_contexts.py::test_a_function_that_is_too_small_is_not_called": "its neighbours",
    "passes/test_channels_first.py::test_regions_are_renewed_as_they_would_be_found": "its neighbours",
    "shipping/test_building.py::test_a_head_in_parts_gives_the_likeliest_token_of_each": (
        "passes/test_split_head.py"
    ),
    "shipping/test_building.py::test_a_tied_table_is_stored_once_in_all_chunks": (
        "shipping/test_shared_tables.py"
    ),
    "shipping/test_building.py::test_a_packed_table_in_parts_is_stored_once": "shipping/test_shared_tables.py",
    "shipping/test_recurrent_decoders.py::test_a_graph_that_gets_no_cache_is_built_by_its_steps": (
        "test_a_checkpoint_becomes_a_folder_that_writes_what_transformers_writes"
    ),
    "shipping/test_agreement.py::test_a_window_that_is_lost_is_seen_beyond_it": (
        "test_one_row_that_is_wrong_is_found_where_all_together_seem_near"
    ),
    "passes/test_converted_masks.py::test_hugging_face": "test_every_spelling",
    "passes/test_embedding_matmul.py::test_negative_ids_count_from_the_end_where_the_gather_says_so": (
        "test_a_guard_goes_when_the_ids_cannot_be_negative"
    ),
    "passes/test_embedding_matmul.py::test_two_lookups_two_readers_and_a_nested_block": "its neighbours",
    "shipping/test_building.py::test_fewer_bits_are_said_with_what_they_cost": (
        "compressing/test_compression.py"
    ),
    "passes/test_fix_shapes.py::test_loops_of_a_recurrent_model_get_the_length_too": (
        "test_what_grows_in_a_loop_has_no_one_length"
    ),
    "shipping/test_several_sizes.py::test_loops_of_real_models_are_unrolled": (
        "passes/test_unroll_loop.py::test_a_scripted_loop_of_torch"
    ),
    "shipping/test_lengthened.py::test_a_converted_module": "test_each_size_is_the_model_built_at_it",
    "shipping/test_mapped_weights.py::test_a_conversion_holds_no_weights": "its neighbours",
    "passes/test_integers_as_floats.py::test_positions_up_to_a_length_need_no_promise": "its neighbours",
    "neuralnetwork/test_network_ranks.py::test_chains_of_layers": "its neighbours",
    "passes/test_index_casts.py::test_a_converted_model": "its neighbours",
    "passes/test_embedding_matmul.py::test_a_table_of_its_own_is_padded_and_not_stored_twice": (
        "test_a_tied_head_keeps_sharing_the_table"
    ),
    "passes/test_embedding_matmul.py::test_a_guard_stays_unless_the_caller_promises": "its neighbours",
    "passes/test_fold_constants.py::test_converted_models_keep_their_numbers": "its neighbours",
    "passes/test_chain_pools.py::test_many_channels_are_proved_as_one": "its neighbours",
    "passes/test_integers_as_floats.py::test_a_converted_mask_keeps_one_integer_op": "its neighbours",
    "passes/test_gather_to_moves.py::test_a_converted_mask_is_read_by_a_reshape": "its neighbours",
    "passes/test_fold_long_axis.py::test_auto_repairs_long_audio": "its neighbours",
    "compressing/test_sensitivity.py::test_the_commands": "its neighbours",
    "frontend/test_conversions.py::test_families_in_fp16": "test_families_convert_the_plain_way",
    "passes/test_apply_remedies.py::test_no_share_falls_and_a_second_run_changes_nothing": (
        "recipes/test_never_slower.py"
    ),
    "splitting/test_splitting.py::test_chunks_equal_a_whole_whose_weights_find_no_room": "its neighbours",
    "checking/test_random_programs.py::test_a_mutation_of_other_words_is_not_proved": (
        "test_a_mutation_is_refused"
    ),
    "examples/test_examples.py::test_the_command_says_what_to_do_next": "test_bad_names_and_places",
    "compressing/test_cache_codes.py::test_a_model_without_a_cache_and_a_target_with_a_doubt": (
        "test_where_it_cannot_be_is_said"
    ),
    "recipes/test_recipe_gpt2.py::test_a_step_that_cannot_act_gets_a_line": "its neighbours",
    "placement/test_statement_scores.py::test_a_part_of_the_statements": "placement/test_statements.py",
    "show/test_headline.py::test_shares_are_those_of_an_inspection": (
        "test_the_sentence_has_share_time_numbers_and_interface"
    ),
    "files/test_compiled.py::test_every_verb_takes_a_compiled_model": "its neighbours",
    "passes/test_apply_remedies.py::test_patches_of_a_film_go_where_two_things_speak_against_them": (
        "its neighbours"
    ),
    "shipping/test_building.py::test_a_mixture_of_experts_is_built": (
        "frontend/test_conversions.py::test_dense_experts_are_those_that_transformers_chooses"
    ),
    "recipes/test_recipe_gpt2.py::test_options": "its neighbours",
    "passes/test_pad_last_axis.py::test_linear_without_a_bias_and_a_long_chain": "its neighbours",
    "passes/test_pad_models.py::test_stays_after_the_default_pipeline": "test_converted_models",
    "passes/test_explicit_broadcast.py::test_any_two_shapes": "test_every_op_on_either_side",
    "shipping/test_sized_models.py::test_a_bert_at_each_size_and_between": "test_small_models_at_six_sizes",
    "passes/test_position_function.py::test_chunks_write_the_same": (
        "splitting/test_splitting.py::test_a_chain_on_disk_is_one_model"
    ),
    "passes/test_patch_convolution.py::test_the_patch_embedding_of_a_converted_clip": (
        "test_every_output_is_the_same_sum"
    ),
    "passes/test_position_function.py::test_a_ring_is_blended_around_its_end": (
        "test_places_that_are_off_by_one_would_be_found"
    ),
    "passes/test_sequence_layout.py::test_text_encoders_take_it_where_it_was_measured_to_help": (
        "test_wrong_versions_are_caught"
    ),
    "passes/test_widen_to_fp32.py::test_long_chains_are_looked_at_as_far_as_a_region_reaches": "its neighbours",
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
        if (
            place in STANDS_IN
            or case[:-1] in WAITS.get(place, ())
            or (place in STAYS and case[:-1] not in STAYS[place])
        ):
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
    rows = [(place, case) for table in (STAYS, WAITS) for place, cases_of in table.items() for case in cases_of]
    rows += [(place, "") for place in (*ONE_OF, *STANDS_IN)]
    return [
        f"{place}[{case}]" if case else place
        for place, case in rows
        if place.partition("::")[0] in files and (place not in cases or (case and case not in cases[place]))
    ]
