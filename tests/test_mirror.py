"""Tests mirror the tree: each module has a test of its name, or a law named here covers it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import fzero

PACKAGE = Path(fzero.__file__).parent
TESTS = Path(__file__).parent
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.name != "__init__.py"  # faces: they only name what others have
)

# A module without tests/<its folder>/test_<its name>.py -> file and test that would fail with it.
LAWS = {
    # the ranks
    "distributed/buckets": "program/passes/test_passes.py: "
    "buckets_carry_every_leaf_once_and_in_time",
    "distributed/journal": "engine/test_ranks_differ.py: every_rank_is_told",
    "distributed/works": "distributed/test_whereabouts.py: each_rank_learns_what_became_of_another",
    "passes": "program/passes/test_users.py: a_value_is_replaced_by_what_a_pass_computes",
    # values, optimizers, user code, what a user sets
    "functional/carried": "functional/test_leftovers.py: "
    "what_the_next_call_would_compute_with_is_refused",
    "numerics/casts": "numerics/test_precision.py: output_casts_floating_outputs_while_in_force",
    "optim/adafactor": "laws/test_optimizers.py: twenty_steps_equal_the_reference",
    "optim/adam": "optim/test_torch_parity.py: adam_and_adamw_have_torchs_numbers",
    "optim/averages": "laws/test_optimizers.py: twenty_steps_equal_the_reference",
    "optim/foreach": "optim/test_compose.py: "
    "groups_hold_every_leaf_once_and_no_more_bytes_than_asked",
    "optim/inplace": "optim/test_laws.py: apply_in_place_equals_params_plus_updates",
    "optim/lamb": "laws/test_optimizers.py: twenty_steps_equal_the_reference",
    "optim/lion": "optim/test_torch_parity.py: lion_follows_its_paper",
    "optim/sgd": "optim/test_torch_parity.py: sgd_has_torchs_numbers",
    "optim/shards": "laws/test_optimizers.py: twenty_steps_equal_the_reference",
    "optim/transforms": "optim/test_torch_parity.py: "
    "the_composed_form_has_the_numbers_of_the_fused_one",
    "functional/draws": "transforms/test_notes.py: "
    "numbers_of_host_generators_are_refused_with_their_line",
    "functional/outside": "transforms/test_notes.py: "
    "what_is_read_from_outside_counts_at_every_call",
    "functional/plain": "eager/test_owned.py: a_parameter_of_another_class_is_refused_by_name",
    "functional/slots": "functional/test_functionalize.py: only_the_passed_tensors_count",
    "functional/tasks": "engine/test_programs.py: the_gradients_are_those_of_plain_torch",
    "functional/torch_checkpoint": "program/passes/test_remat.py: a_checkpoint_changes_no_number",
    "config/deepspeed": "config/test_config.py: a_usual_zero3_configuration",
    "config/names": "program/passes/test_users.py: a_pass_is_known_by_a_name_that_all_ranks_have",
    # lazy parameters
    "eager/arrivals": "step/test_eager.py: training_equals_plain_torch",
    "eager/units": "engine/test_programs.py: the_gradients_are_those_of_plain_torch",
    # Programs
    "program/categories": "program/test_held.py: leaves_and_lines_are_named",
    "program/pipeline": "program/test_listing.py: listing_is_the_golden_one",
    "program/program": "program/test_listing.py: listing_is_the_golden_one",
    "program/placed": "program/passes/test_place.py: "
    "values_and_peak_stay_where_gradients_are_placed",
    "program/promises": "program/test_rules.py: every_mutation_is_found_and_its_node_named",
    "program/sections": "program/test_listing.py: layers_that_are_alike_are_shown_once",
    "program/strides": "program/test_codegen.py: restored_has_the_values_and_the_strides",
    "functional/uncompiled": "step/test_eager.py: a_compiled_part_draws_what_it_draws_uncompiled",
    "functional/apart": "functional/test_opaque.py: backward_sees_the_random_numbers_of_forward",
    "functional/islands": "functional/test_opaque.py: an_island_trains_as_plain_torch",
    "program/trace": "test_errors.py: what_cannot_be_staged_out_is_shown_with_its_line",
    "program/dynamic": "laws/test_dynamic.py: every_batch_has_the_bits_of_a_recording_of_its_own",
    "program/symbols": "laws/test_dynamic.py: "
    "two_recordings_serve_all_lengths_where_nothing_else_changes",
    "program/frontier": "program/test_fitting.py: less_memory_never_takes_fewer_flops_again",
    "program/codec": "step/test_saved.py: what_is_loaded_computes_what_was_recorded",
    "program/passes/groups": "program/passes/test_sketch.py: a_step_is_sketched_whole",
    "program/passes/bucket": "program/passes/test_passes.py: "
    "bucket_takes_the_largest_size_that_memory_allows",
    "program/passes/gathers": "program/passes/test_passes.py: gathers_sink_and_are_made_again",
    "program/passes/rewrite": "program/passes/test_passes.py: "
    "legalise_makes_any_order_legal_and_keeps_a_legal_one",
    "program/passes/schedule": "program/passes/test_passes.py: "
    "buckets_carry_every_leaf_once_and_in_time",
    # state and step
    "state/follow": "laws/test_writes.py: what_is_written_counts",
    "state/homes": "step/test_update.py: parameters_of_flats_are_at_home_from_init_on",
    "state/init": "laws/test_parity.py: one_rank_is_bitwise_plain_torch",
    "state/model_state": "engine/test_buffers.py: others_become_the_mean_or_the_first_ranks",
    "state/opt_state": "laws/test_precision.py: masters_equal_those_kept_by_hand",
    "state/plan": "test_errors.py: an_optimizer_state_of_another_kind_is_refused",
    "state/replay": "state/test_builder.py: a_replay_is_a_call_bit_for_bit",
    "program/passes/donate": "transforms/test_function.py: "
    "donated_trees_of_one_shape_can_change_places",
    "transforms/call": "transforms/test_derivatives.py: every_transform_equals_plain_torch",
    "transforms/loss": "laws/test_precision.py: masters_equal_those_kept_by_hand",
    "transforms/parts": "transforms/test_derivatives.py: every_transform_equals_plain_torch",
    "transforms/saved_notes": "step/test_saved.py: what_the_model_function_reads_is_compared",
    "transforms/staging": "transforms/test_function.py: a_step_of_ones_own_trains_as_torch_does",
    "step/alternatives": "program/test_fitting.py: what_does_not_fit_says_the_least_and_what_would",
    "step/executors": "test_mismatch.py: "
    "another_branch_in_the_first_call_is_named_and_the_next_call_is_right",
    "step/metrics": "test_errors.py: a_step_that_is_not_finite_is_raised_and_changes_nothing",
    "step/traced": "laws/test_parity.py: one_rank_is_bitwise_plain_torch",
    "step/update_program": "step/test_update.py: optimizers_on_shards_equal_those_on_whole_leaves",
    # worlds that aren't there
    "simulate": "simulation/test_simulation.py: "
    "the_module_of_the_command_line_can_be_called_as_the_function",
    "simulation/fakes": "simulation/test_simulation.py: nothing_of_the_models_size_is_allocated",
    "program/machines": "program/test_hardware.py: "
    "products_waste_what_their_tiles_and_last_wave_have_to_spare",
    # checkpoints
    "checkpoint/__main__": "checkpoint/test_damage.py: inspect_verify_and_export",
    "checkpoint/background": "checkpoint/test_save.py: a_second_save_waits_for_the_first",
    "checkpoint/compare": "checkpoint/test_trees.py: all_differences_are_told_at_once",
    "checkpoint/fill": "checkpoint/test_resume.py: resuming_is_exact",
    "checkpoint/flatten": "checkpoint/test_trees.py: every_leaf_has_a_key_of_its_own",
    "checkpoint/load": "checkpoint/test_trees.py: what_is_saved_is_what_is_loaded",
    "checkpoint/ranks": "checkpoint/test_save.py: ranks_that_differ_are_told",
    "checkpoint/format/boxes": "checkpoint/test_trees.py: boxes_are_what_dtensors_hold",
    "checkpoint/format/disk": "checkpoint/test_kills.py: a_kill_at_any_call_loses_nothing",
    "checkpoint/format/folders": "checkpoint/test_lineage.py: any_history_keeps_what_it_stands_on",
    "checkpoint/format/manifest": "checkpoint/test_damage.py: "
    "a_manifest_that_contradicts_itself_is_refused",
    "checkpoint/format/pieces": "checkpoint/test_trees.py: pieces_cover_a_tensor_in_order",
    "checkpoint/format/reader": "checkpoint/test_reshard.py: "
    "leaves_that_lie_otherwise_are_read_alike",
    "checkpoint/format/verify": "checkpoint/test_damage.py: any_flipped_bit_is_found",
    "checkpoint/format/writer": "checkpoint/test_reshard.py: "
    "every_job_reads_what_every_other_wrote",
    # the Engine
    "engine/attach": "engine/test_corners.py: a_module_has_one_engine",
    "engine/autograd": "engine/test_random_programs.py: any_program_on_one_rank",
    "engine/backward_state": "engine/test_phases.py: "
    "every_gradient_is_reduced_once_in_every_history",
    "engine/engine": "engine/test_programs.py: the_gradients_are_those_of_plain_torch",
    "engine/events": "engine/test_phases.py: every_gradient_is_reduced_once_in_every_history",
    "engine/forward": "engine/test_exceptions.py: gradients_of_a_forward_that_raised_are_gone",
    "engine/outputs": "engine/test_corners.py: inputs_of_every_container_are_cast",
    "engine/parts": "engine/test_options.py: mean_or_sum_and_where_the_division_is",
    "engine/reducer": "engine/test_options.py: a_mesh_of_replicas_of_shards",
    "engine/stepper": "engine/test_state.py: five_steps_in_each_are_ten_in_either",
    # other libraries' interfaces
    "compat/deepspeed/answers": "compat/deepspeed/test_engine.py: "
    "a_deepspeed_script_trains_as_plain_torch",
    "compat/deepspeed/checkpoint/utils": "compat/deepspeed/test_saving.py: "
    "a_clone_for_torch_save_is_a_copy_without_the_memory_around_it",
    "compat/deepspeed/checkpointing": "compat/deepspeed/test_engine.py: "
    "a_deepspeed_script_trains_as_plain_torch",
    "compat/deepspeed/comm": "compat/deepspeed/test_engine.py: "
    "a_deepspeed_script_trains_as_plain_torch",
    "compat/deepspeed/devices": "compat/deepspeed/test_engine.py: "
    "a_deepspeed_script_trains_as_plain_torch",
    "compat/deepspeed/launch": "compat/deepspeed/test_engine.py: "
    "a_deepspeed_script_trains_as_plain_torch",
    "compat/deepspeed/loaders": "compat/deepspeed/test_engine.py: "
    "a_deepspeed_script_trains_as_plain_torch",
    "compat/deepspeed/owners": "compat/deepspeed/test_fragments.py: "
    "what_is_written_is_read_and_trained_with",
    "compat/deepspeed/utils/zero_to_fp32": "compat/deepspeed/test_saving.py: "
    "weights_are_read_without_ranks",
}


def has_own(module: str, tests: Path = TESTS) -> bool:
    """Whether `module`, a path below fzero/, has a test file of its name."""
    folder, _, name = module.rpartition("/")
    return (tests / folder / f"test_{name}.py").exists()


def faults(modules: Iterable[str], laws: Mapping[str, str], tests: Path = TESTS) -> list[str]:
    """What the table lacks, and what in it is not so."""
    modules = list(modules)
    messages = []
    for module in modules:
        if not has_own(module, tests) and module not in laws:
            messages.append(
                f"fzero/{module}.py has no test: add tests/{module.rpartition('/')[0]}/test_"
                f"{module.rpartition('/')[2]}.py, or a row in LAWS in tests/test_mirror.py"
            )
    for module, law in laws.items():
        file, _, name = law.partition(": ")
        if module not in modules:
            messages.append(f"{module} is no module: take its row out")
        elif has_own(module, tests):
            messages.append(f"{module} has a test of its own: take its row out")
        elif not (tests / file).exists():
            messages.append(f"{module}: there is no tests/{file}")
        elif not re.search(rf"^def test_{name}\(", (tests / file).read_text(), re.MULTILINE):
            messages.append(f"{module}: tests/{file} has no test_{name}")
    return messages


def test_every_module_has_a_test_or_a_law() -> None:
    found = faults(MODULES, LAWS)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", [p for p in sorted(TESTS.rglob("*")) if p.is_dir()], ids=str)
def test_folders_of_tests_are_those_of_the_tree(folder: Path) -> None:
    if list(folder.glob("test_*.py")):
        there = (PACKAGE / folder.relative_to(TESTS)).is_dir()
        # of no package alone: true of all stages and executors, models, examples, devices, docs
        of_none = ("laws", "models", "examples", "fuzz", "cluster", "cuda", "docs")
        assert there or folder.name in of_none


def test_faults_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("")
    (tmp_path / "test_laws.py").write_text("def test_adds_up() -> None: ...")
    assert faults(["a", "b"], {"b": "test_laws.py: adds_up"}, tmp_path) == []
    for modules, laws in [
        (["a", "new"], {}),
        (["a"], {"gone": "test_laws.py: adds_up"}),
        (["a"], {"a": "test_laws.py: adds_up"}),
        (["b"], {"b": "test_other.py: adds_up"}),
        (["b"], {"b": "test_laws.py: adds"}),
    ]:
        assert len(faults(modules, laws, tmp_path)) == 1
