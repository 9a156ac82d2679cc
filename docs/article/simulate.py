"""The simulations behind the bundled article, `src/pyramidion/assets/document.txt`: populations of circadian neurons.

It needs numpy alone, takes about 20 minutes, and prints the figures of each of the article's sections:

    python docs/article/simulate.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float32]
STEP = 0.25  # hours
DAY = int(24 / STEP)  # steps
NOISE = 1.5 * 2 * math.pi / 24 / math.sqrt(24)  # an isolated neuron's period then varies by 1.5 hours
STRENGTHS = (0.02, 0.025, 0.03, 0.04, 0.06, 0.1, 0.2)  # of coupling, radians an hour
CHANCE = np.random.default_rng(24)


@dataclass(frozen=True)
class Population:
    """Neurons that differ in their periods, are disturbed, and hold on to each other.

    spread  standard deviation of their periods, hours
    lit     the fraction that receives light
    led     whether all follow those that receive light, instead of all
    common  the part of the noise's variance that all share
    back    how fast an amplitude returns to normal, an hour; None: phases alone
    """

    neurons: int = 500
    spread: float = 1.2
    lit: float = 0.0
    led: bool = False
    common: float = 0.0
    back: float | None = None

    def run(
        self, coupling: Sequence[float], days: int, *, cycle: Sequence[float] | float = 24.0, shift: float = 0.0,
        mixed: bool = False,
    ) -> NDArray[np.complex128]:  # fmt: skip
        """Give the mean of all neurons [steps runs], one run for each coupling; `shift` moves the light on day 30."""
        pull = np.asarray(coupling, np.float32)[:, None]
        cycle = np.broadcast_to(np.asarray(cycle, np.float32), (len(pull),))[:, None]
        shape = (len(pull), self.neurons)
        periods = np.clip(24 + self.spread * _normal(shape), 15, 33)
        turn = 1j * (2 * np.pi / periods)
        phase = CHANCE.uniform(0, 2 * np.pi, shape) if mixed else np.zeros(shape)
        z = np.exp(1j * phase).astype(np.complex64)
        seeing = round(self.lit * self.neurons)
        light = 0.1 * (np.arange(self.neurons) < seeing).astype(np.float32)
        heard = slice(None, seeing if self.led else None)
        found = np.empty((days * DAY, len(pull)), complex)
        for step in range(days * DAY):
            hour = step * STEP + (shift if step >= 30 * DAY else 0.0)
            found[step] = z.mean(1)
            force = pull * z[:, heard].mean(1, keepdims=True) + light * (hour % cycle < cycle / 2)
            z = self._moved(z, turn, pull, force)
        return found

    def _moved(self, z: Any, turn: Any, pull: Numbers, force: Any) -> Any:
        """Go one step on: the force acts on the phase, or on both coordinates where there is an amplitude."""
        noise = math.sqrt(1 - self.common) * _normal(z.shape) + math.sqrt(self.common) * _normal((len(z), 1))
        kick = NOISE * math.sqrt(STEP) * noise
        if self.back is None:
            return z * np.exp(STEP * turn + 1j * (STEP * (force * z.conj()).imag + kick)).astype(np.complex64)
        change = self.back * (1 - np.abs(z) ** 2) * z - pull * z + force
        return (
            z * np.exp(STEP * turn) + STEP * change + kick + 1j * math.sqrt(STEP) * NOISE * _normal(z.shape)
        ).astype(np.complex64)


def _normal(shape: tuple[int, ...]) -> Numbers:
    return CHANCE.standard_normal(shape, dtype=np.float32)


def variation(mean: NDArray[np.complex128], skip: int = 60) -> float:
    """Give the standard deviation, in minutes, of the time between passages of the mean phase through zero."""
    phase = np.maximum.accumulate(np.unwrap(np.angle(mean))) / (2 * np.pi) + 1e-9 * np.arange(len(mean))
    passed = np.interp(np.arange(math.ceil(phase[skip * DAY]), phase[-1]), phase, STEP * np.arange(len(mean)))
    return float(np.diff(passed).std() * 60)


def entrained(population: Population, coupling: float) -> list[float]:
    """List the light cycles, in hours, against which the phase hardly drifts in the last twenty of eighty days."""
    cycles, found = np.arange(18, 30.01, 0.25), []
    means = population.run([coupling] * len(cycles), 80, cycle=cycles)
    for cycle, mean in zip(cycles, means.T, strict=True):
        phase = np.unwrap(np.angle(mean) - 2 * np.pi * STEP * np.arange(len(mean)) / cycle) * cycle / (2 * np.pi)
        if abs(phase[-1] - phase[-int(20 * cycle / STEP)]) < 1.5:
            found.append(float(cycle))
    return found


def recovery(population: Population, coupling: float, shift: float, runs: int = 20) -> tuple[float, int]:
    """Give the mean of days until the phase stays within an hour of its new place, and how many runs never arrive."""
    days, means = [], population.run([coupling] * runs, 75, shift=shift)
    steady = np.exp(-2j * np.pi * STEP * np.arange(len(means)) / 24)
    for mean in means.T:
        each = mean * steady / np.abs(mean)
        wanted = each[15 * DAY : 30 * DAY].mean() * np.exp(2j * np.pi * shift / 24)
        daily = each[30 * DAY :].reshape(-1, DAY).mean(1)
        late = np.flatnonzero(np.abs(np.angle(daily / wanted)) * 24 / (2 * np.pi) > 1)
        days.append(late[-1] + 1 if len(late) else 0)
    there = [day for day in days if day < 45]
    return float(np.mean(there)) if there else math.nan, runs - len(there)


def main() -> None:
    """Print the figures, section by section."""
    for spread in (0.6, 1.2, 2.4):
        strengths = np.array([0.0, 0.016, 0.0225, 0.026, 0.0275, 0.03, 0.04, 0.048, 0.05, 0.1, 0.2])
        means = Population(1000, spread).run(np.repeat(strengths, 4), 120, mixed=True)
        print(f"\nperiods differ by {spread} h: coupling, coherence, variation of the period in minutes")
        for strength, runs in zip(strengths, means.T.reshape(len(strengths), 4, -1), strict=True):
            told = np.abs(runs[:, 60 * DAY :]).mean(), np.median([variation(run) for run in runs])
            print(f"  {strength:.4f}  {told[0]:.2f}  {told[1]:6.1f}")
    print("\nneurons, variation in minutes")
    for neurons in (1, 10, 100, 1000, 3000):
        means = Population(neurons).run([0.1] * 8, 120)
        print(f"  {neurons:5d}  {np.mean([variation(run, 20) for run in means.T]):6.1f}")
    print("\npart of the noise that is common, variation in minutes")
    for common in (0.001, 0.01):
        means = Population(1000, common=common).run([0.1] * 6, 120)
        print(f"  {common:5g}  {np.median([variation(run, 20) for run in means.T]):6.1f}")
    forms = {f"{lit:.0%} receive light": Population(lit=lit) for lit in (1.0, 0.5, 0.25, 0.1)}
    forms["25% receive light and lead"] = Population(lit=0.25, led=True)
    forms |= {f"25%, amplitude returns at {back}": Population(lit=0.25, back=back) for back in (0.02, 0.05, 0.2)}
    for name, population in forms.items():
        print(f"\n{name}: coupling, entrained to, days after an advance and a delay of 8 h (runs that never recover)")
        for strength in STRENGTHS:
            cycles = entrained(population, strength)
            told = f"{min(cycles):5.2f} to {max(cycles):5.2f} h" if cycles else "       nothing"
            moved = [recovery(population, strength, shift) for shift in (8.0, -8.0)]
            print(f"  {strength:.3f}  {told}  " + "  ".join(f"{days:5.1f} ({never})" for days, never in moved))


if __name__ == "__main__":
    main()
