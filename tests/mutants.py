"""Faults that there were, or that would be silent, each as a change of the source, and the test that must find it.

``python -m tests.mutants [words]`` plants those whose names have one of the words, by default all of them, one after
the other in a copy of the working tree, and tells which tests fail, as they must. ``plant`` does so in this process.
"""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import reduce
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """A fault.

    Args:
        file: The file in ``lightning_tricks`` that has it.
        old: What stands there, once.
        new: What stood there, or would be wrong.
        test: The test in ``tests`` that must find it.
    """

    file: str
    old: str
    new: str
    test: str


MUTANTS = {
    # Averages of weights
    "an average begins before on_train_start": Mutant(
        "core/averaging/callback.py",
        "            around_next_step(trainer, self._undo, partial(self._forget_replaced, trainer))",
        "            around_next_step(trainer, self._undo, partial(self._forget_replaced, trainer))\n"
        '        elif plan_step(trainer) >= self._steps["start"]:\n            self._track()',
        "fuzz/test_twins.py::test_a_module_trains_as_its_twin",
    ),
    "raw weights are those of the file": Mutant(
        "core/averaging/coordinator.py",
        '        if "state_dict" in checkpoint and not sharded and any(copies_in(checkpoint)):',
        "        if False:",
        "core/averaging/test_resume.py::test_a_checkpoint_of_an_older_class_resumes_exactly",
    ),
    "an average is not restored": Mutant(
        "core/averaging/callback.py",
        "        if found := find_state(trainer, self, saved, weights.trainable()):",
        "        if found := None:",
        "callbacks/test_ema.py::test_resume_is_bit_exact",
    ),
    "an interrupted fit leaves the average in the module": Mutant(
        "core/averaging/coordinator.py",
        '            stack.callback(self.leave, "raw")',
        '            stack.callback(self.leave, "averaged")',
        "callbacks/test_ema.py::test_an_exception_in_validation_leaves_the_module_raw_and_the_checkpoint_right",
    ),
    "the step before an exception is not averaged": Mutant(
        "core/averaging/coordinator.py",
        "                stack.callback(callback.catch_up, self.trainer)",
        "                pass",
        "callbacks/test_post_hoc_ema.py::test_a_fit_that_raises_behind_a_step_has_averaged_it",
    ),
    "averages of several lengths are not restored": Mutant(
        "callbacks/post_hoc_ema.py",
        '        saved = checkpoint.get("callbacks", {}).get(self.state_key)',
        "        saved = None",
        "callbacks/test_post_hoc_ema.py::test_a_resumed_fit_goes_on_exactly_and_replaces_what_came_after",
    ),
    "the norm of an average is in host memory": Mutant(
        "core/averaging/averages.py",
        "        squares = torch.zeros(2, device=device)",
        "        squares = torch.zeros(2)",
        "device/test_tricks.py::test_a_device_trains_the_same_and_is_not_waited_for[fp32-EMA]",
    ),
    "a buffer that was made in inference mode is written to": Mutant(
        "core/averaging/averages.py",
        "part.detach() if part.is_inference() else part for part",
        "part for part",
        "callbacks/test_ema.py::test_buffers_that_were_made_in_inference_mode_are_averaged",
    ),
    "the ranks have other averaged buffers": Mutant(
        "core/averaging/agree.py",
        "        copy_(tensors[bucket], means)",
        "        pass",
        "core/averaging/test_ranks.py::test_averaged_statistics_are_the_same_on_all_ranks_and_the_mean_of_theirs",
    ),
    "the warm-up of EMA is another": Mutant(
        "core/averaging/decay.py",
        "(1 + updates) / (10 + updates)",
        "(1 + updates) / (9 + updates)",
        "callbacks/test_ema.py::test_equals_a_naive_average",
    ),
    "the mean of SWA has the first weights twice": Mutant(
        "callbacks/swa.py",
        "        averages.lerp(1 / (averages.updates + 1))",
        "        averages.lerp(1 / (averages.updates + 2))",
        "callbacks/test_swa.py::test_equals_a_naive_mean",
    ),
    "BatchNorm in TorchScript is not recalculated": Mutant(
        "core/averaging/batchnorm.py",
        '        and "BatchNorm" in getattr(layer, "original_name", "")',
        "        and False",
        "conformance/test_torchscript.py::test_what_cannot_be_is_refused_by_name_before_the_first_step",
    ),
    # A step that runs a second time
    "a second run writes weights again": Mutant(
        "core/replay/module_state.py",
        "        copied = weight.numel() == 1 or (self._deep and id(weight) not in self._registered)",
        "        return",
        "core/replay/test_module_state.py::test_what_is_written_through_data_is_restored",
    ),
    "a number that cannot be set back is no error": Mutant(
        "core/replay/module_state.py",
        "            if _numbers_in(value) != before:",
        "            if False:",
        "core/replay/test_module_state.py::test_an_object_that_cannot_be_restored_is_refused_by_its_path",
    ),
    "a sweep leaves the weights trained": Mutant(
        "core/replay/undone_fit.py",
        "*owners, self._state.restore, *weights])",
        "*owners, self._state.restore])",
        "core/replay/test_fit_state.py::test_whatever_the_trainer",
    ),
    "a second run draws other numbers of the device": Mutant(
        "core/random_numbers.py",
        "        state[device.type] = _generators(device).get_rng_state(device)",
        "        pass",
        "core/test_random_numbers.py::test_the_devices_generator_is_among_them",
    ),
    "SAM leaves the weights where it has perturbed them": Mutant(
        "modules/sam/engine.py",
        "run_all([self.weights.reshard, partial(copy_, parts, before)])",
        "run_all([self.weights.reshard])",
        "modules/sam/test_rules.py::test_equals_a_naive_loop",
    ),
    "the perturbation of SAM is as long as the gradient": Mutant(
        "modules/sam/rules.py",
        "        scale = rho / (length + 1e-12)",
        "        scale = rho * torch.ones_like(length)",
        "modules/sam/test_rules.py::test_the_perturbations_are_the_formulas_in_double_precision",
    ),
    "statistics of a step that is left out stay": Mutant(
        "core/nonfinite/step_guard.py",
        "                local_part(buffer).copy_(copied, non_blocking=True)",
        "                pass",
        "core/nonfinite/test_step_guard.py::test_a_window_gives_the_buffers_back",
    ),
    # Batches and losses
    "integers that choose are no labels": Mutant(
        "core/mixed_targets/unmixed.py",
        "    func, samples = use.func, use.part.plan.samples",
        "    return False",
        "core/mixed_targets/test_unmixed.py::test_a_second_label_that_is_not_named_is_refused_by_its_path",
    ),
    "long sequences are harder": Mutant(
        "core/mixed_targets/scores.py",
        "torch.where(self._is_mean, self._mean, alone)",
        "alone",
        "core/mixed_targets/test_scores.py::test_samples_are_compared_by_the_losses_that_they_have_alone",
    ),
    "what is cut has gaps in memory": Mutant(
        "core/batches/form.py",
        "        return new.contiguous()",
        "        return new",
        "callbacks/test_sequence_length_warmup.py::test_what_was_contiguous_is_so_when_it_is_cut",
    ),
    "a size grows by the real step": Mutant(
        "core/batches/growing.py",
        "step, start, stop = float(plan_step(trainer))",
        "step, start, stop = float(trainer.global_step)",
        "core/batches/test_growing.py::test_a_fit_after_an_interrupted_one_has_the_sizes_of_the_plan",
    ),
    "Mixup weighs the partner by lam": Mutant(
        "callbacks/mixup.py",
        "    return partners.lerp_(x, lam)",
        "    return x.lerp(partners, lam)",
        "callbacks/test_mixup.py::test_it_is_the_convex_combination_in_a_new_tensor",
    ),
    "the box of CutMix has another area": Mutant(
        "callbacks/cutmix.py",
        "round(size * math.sqrt(1 - lam))",
        "round(size * (1 - lam))",
        "callbacks/test_cutmix.py::test_every_pixel_is_that_of_the_paper_and_the_share_is_exact",
    ),
    "every batch counts as much as another": Mutant(
        "callbacks/token_mean.py",
        "        return self._here / self._unit",
        "        return torch.ones_like(self._unit)",
        "callbacks/test_token_mean.py::test_a_large_batch_gives_the_same",
    ),
    "one pixel is reflected": Mutant(
        "modules/blur_pool.py",
        "    if height > 1 and width > 1:",
        "    if True:",
        "modules/test_blur_pool.py::test_one_pixel_on_a_side_is_its_own_neighbour",
    ),
    # Gradients and optimizers
    "Muon trains the rest at a tenth of the rate": Mutant(
        "optimizers/by_name.py",
        'settings.pop("adamw_lr", lr), 0.0)',
        'settings.pop("adamw_lr", lr / 10), 0.0)',
        "optimizers/test_by_name.py::test_muon_steps_as_far_as_adamw_and_trains_the_others_as_adamw_does",
    ),
    "units at zero never move": Mutant(
        "callbacks/adaptive_clip.py",
        ".clamp_(min=eps).mul_(clip_factor)",
        ".mul_(clip_factor)",
        "callbacks/test_adaptive_clip.py::test_the_function_is_timms_bit_for_bit",
    ),
    "a history forgets nothing": Mutant(
        "callbacks/auto_clip.py",
        "            del self._ordered[bisect_left(self._ordered, oldest)]",
        "            pass",
        "callbacks/test_auto_clip.py::test_a_history_of_numbers_has_numpys_percentile_of_its_last_norms",
    ),
    "a history is not restored": Mutant(
        "callbacks/auto_clip.py",
        '        self._norms = dict(state_dict["norms"])',
        "        pass",
        "callbacks/test_auto_clip.py::test_a_resume_goes_on_exactly_with_the_history",
    ),
    "a rank has the norm of its own shards": Mutant(
        "core/weights/fsdp2.py",
        "        dist.all_reduce(total)",
        "        pass",
        "callbacks/test_auto_clip.py::test_ranks_have_the_norm_of_all",
    ),
    "a parameter of integers is stepped": Mutant(
        "callbacks/step_in_backward.py",
        "for weight in weights if weight.is_floating_point() or weight.is_complex()]",
        "for weight in weights]",
        "callbacks/test_step_in_backward.py::test_a_parameter_of_integers_stays_as_it_is",
    ),
    # Plans and schedules
    "the plan from epoch 0 stands for what happened": Mutant(
        "core/lightning/fit.py",
        "        return self.step - self.taken",
        "        return 0",
        "core/lightning/test_fit.py::test_every_curve_ends_where_training_ends",
    ),
    "what is left stands for the whole plan": Mutant(
        "core/lightning/steps.py",
        "                return total, before",
        "                return max(1, total - taken), 0",
        "core/lightning/test_fit.py::test_a_fit_after_an_interrupted_one_has_the_rates_that_are_left",
    ),
    "Lightning's counts of batches and epochs stay as they are": Mutant(
        "core/lightning/fit.py",
        "        batches, loop = self._trainer.num_training_batches, self._trainer.fit_loop",
        "        return",
        "core/lightning/test_fit.py::test_an_epoch_that_was_over_is_over_with_another_number_of_batches",
    ),
    "a checkpoint does not hold the plan": Mutant(
        "core/lightning/fit.py",
        "        plan = self.place.plan",
        "        return Place()._asdict()",
        "core/lightning/test_fit.py::test_a_place_outlives_two_changes_and_is_saved_after_the_fit",
    ),
    "a ragged window is no step": Mutant(
        "core/lightning/steps.py",
        "-(-batch // accumulated) if batch == batches else batch // accumulated",
        "batch // accumulated",
        "core/lightning/test_fit.py::test_the_closed_form_counts_as_a_list_of_epochs_does",
    ),
    "a plateau waits for an epoch that never ends": Mutant(
        "schedules/plateau.py",
        "    interval, every = trainer.val_check_interval, trainer.check_val_every_n_epoch or 1",
        '    return "epoch", 1',
        "schedules/test_plateau.py::test_validations_count_where_no_epoch_ends",
    ),
    "a plateau without validation is no error": Mutant(
        "schedules/plateau.py",
        '    if monitor.startswith("val") and not trainer.enable_validation:',
        "    if False:",
        "schedules/test_plateau.py::test_a_schedule_that_would_never_step_is_refused_before_the_first_step",
    ),
    "a cycle ends a step late": Mutant(
        "schedules/curves.py",
        "    return floor + (1 - floor) * _cosine(_progress(step, peak, total_steps - 1))",
        "    return floor + (1 - floor) * _cosine(_progress(step, peak, total_steps))",
        "schedules/test_curves.py::test_one_cycle_equals_its_formula",
    ),
    # Files
    "hyperparameters may name classes": Mutant(
        "core/safe_load/hyperparameters.py",
        'if name in (*OF_MODULE, "class_path"))',
        "if name in OF_MODULE)",
        "evaluation/test_ensemble.py::test_hyperparameters_that_name_code_are_refused",
    ),
    "a program is a checkpoint": Mutant(
        "core/safe_load/damage.py",
        "    if is_program(file):",
        "    if False:",
        "core/safe_load/test_damage.py::test_a_program_is_told_from_a_checkpoint",
    ),
    "a step that is no number is compared": Mutant(
        "checkpoints/newest.py",
        "(each if type(each) is int else UNKNOWN for each in",
        "(each for each in",
        "checkpoints/test_newest.py::test_a_step_that_is_no_number_is_left_out_or_the_only_one",
    ),
    "a flipped bit is another number": Mutant(
        "core/safe_load/damage.py",
        "wrong = archive.testzip() if",
        "wrong = None if",
        "checkpoints/test_newest.py::test_a_damaged_file_is_left_out",
    ),
    "a name is proof of ownership": Mutant(
        "core/safe_load/own_folder.py",
        "    if not folder.exists() or is_ours(folder, purpose):",
        "    if True:",
        "faults/test_ownership.py::test_what_is_the_users_stays",
    ),
    "a link is followed": Mutant(
        "core/safe_load/own_folder.py",
        "    if folder.is_symlink() or marker.is_symlink() or not marker.is_file():",
        "    if not marker.is_file():",
        "core/safe_load/test_own_folder.py::test_a_link_to_one_of_ours_is_none_of_ours",
    ),
    "half a file stays beside the old one": Mutant(
        "core/safe_load/atomic_file.py",
        "        temporary.unlink(missing_ok=True)",
        "        pass",
        "core/safe_load/test_atomic_file.py::test_an_error_leaves_the_old_file",
    ),
    # Saves while training goes on
    "a checkpoint is written from the memory that training changes": Mutant(
        "strategies/async_save.py",
        "        return copy.deepcopy(state, copies)",
        "        return state",
        "strategies/test_async_save.py::test_a_file_has_the_state_of_the_moment_of_saving",
    ),
    "an older checkpoint is removed while the new one is written": Mutant(
        "strategies/async_save.py",
        "        if self._saving is None:\n            self._remove(filepath)",
        "        if True:\n            self._remove(filepath)",
        "strategies/test_async_save.py::test_what_comes_after_a_save_waits_for_it_and_training_does_not",
    ),
    "an error of a write is forgotten": Mutant(
        "strategies/async_save.py",
        "            self._error = error_of(job)",
        "            error_of(job)",
        "strategies/test_async_save.py::test_an_error_of_a_write_is_raised_by_the_next_save_or_at_the_end",
    ),
    # Layers that are the LightningModule's own
    "a step is not compared with one of unsplit layers": Mutant(
        "strategies/fsdp2/preset.py",
        "        if self._comparison is not None:",
        "        if self._comparison is False:",
        "strategies/fsdp2/test_tensor_parallel.py::test_what_cannot_be_right_is_refused_by_name",
    ),
}  # fmt: skip


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The source of the file with the fault.

    Raises:
        ValueError: If the file does not have the text once.
    """
    source = (root / "lightning_tricks" / mutant.file).read_text()
    if (times := source.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {times} times: a mutant names what stands there once.")
    return source.replace(mutant.old, mutant.new)


def plant(name: str, patch: Any) -> None:
    """Plant a fault in this process, until pytest's ``patch`` takes it back."""
    mutant = MUTANTS[name]
    path = str(ROOT / "lightning_tricks" / mutant.file)
    codes = dict(functions(compile(mutated(mutant), path, "exec")))
    module = import_module("lightning_tricks." + mutant.file.removesuffix(".py").replace("/", "."))
    for qualified, code in functions(compile(Path(path).read_text(), path, "exec")):
        if code.co_code != codes[qualified].co_code or code.co_consts != codes[qualified].co_consts:
            found = reduce(lambda owner, part: vars(owner)[part], qualified.split("."), module)
            patch.setattr(inspect.unwrap(getattr(found, "fget", found)), "__code__", codes[qualified])


def functions(code: CodeType, within: str = "") -> Iterator[tuple[str, CodeType]]:
    """The code of the functions of a module and of its classes, by their qualified names."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name.isidentifier():
            if inner.co_flags & 2:  # of a function; a class has none
                yield within + inner.co_name, inner
            else:
                yield from functions(inner, f"{within}{inner.co_name}.")


def tested(root: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    named = [f"tests/{test}" for test in tests]
    return subprocess.run([*command, *named], cwd=root, env=environment, capture_output=True, text=True)


def copy_of_the_tree(folder: Path) -> Path:
    """The files that git knows, or that it would add, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def main(words: Sequence[str]) -> int:
    """Plant each fault; returns 1 if a test has not found it."""
    chosen = {name: it for name, it in MUTANTS.items() if not words or any(word in name for word in words)}
    alive = []
    with TemporaryDirectory() as folder:
        root = copy_of_the_tree(Path(folder))
        sound = tested(root, [*dict.fromkeys(mutant.test for mutant in chosen.values())])
        if sound.returncode:
            print(f"without a fault the tests do not pass:\n{sound.stdout[-3000:]}{sound.stderr[-1000:]}")
            return 1
        for name, mutant in chosen.items():
            file, began = root / "lightning_tricks" / mutant.file, time.monotonic()
            source = file.read_text()
            file.write_text(mutated(mutant, root))
            done = tested(root, [mutant.test])
            file.write_text(source)
            killed = done.returncode == 1  # of pytest: tests have failed
            alive += [] if killed else [name]
            said = "killed" if killed else f"ALIVE ({done.returncode})"
            print(f"{said:8} {time.monotonic() - began:5.1f} s  {name}  [{mutant.test}]", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} are killed")
    return int(bool(alive))


def has_test(test: str) -> bool:
    """Whether a file of tests has the function of that name."""
    file, name = test.split("[")[0].split("::")
    path = ROOT / "tests" / file
    return path.is_file() and any(
        isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(path.read_text()).body
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
