"""Sounds as Whisper reads them: log-mel frames of waveforms (arXiv 2212.04356), in numpy.

A frame is 10 ms of a waveform of 16 kHz: the energies of bands of the mel scale (Slaney's), as
logarithms, none more than 8 below the largest of the sound. The numbers are those of transformers'
`WhisperFeatureExtractor` (`tests/oracle/test_whisper.py`).
"""

import functools
import io

import numpy as np

from mjax.errors import or_user_error

RATE = 16_000  # samples a second
HOP, WINDOW = 160, 400  # samples from frame to frame, and of one
_LINEAR = 15  # mel at 1 kHz, up to which the scale is linear
_STEP = np.log(6.4) / 27  # of the logarithm of a frequency above, a mel


def decode_frames(encoded: bytes, bins: int, frames: int) -> np.ndarray:
    """fp32 [frames, bins] of the bytes of a file, cut or filled up with silence."""
    return log_mel(decode_sound(encoded), bins, frames)


def decode_sound(encoded: bytes) -> np.ndarray:
    """fp32 [samples] of a file that libsndfile knows (WAV, FLAC, OGG, MP3), channels averaged.

    Raises `ValueError` for what is no such file, of another rate than 16 kHz, empty or not finite.
    """
    with or_user_error("sounds need {reason}; install mjax[audio]", ImportError):
        import soundfile

    try:
        samples, rate = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    except soundfile.SoundFileError as e:
        raise ValueError(str(e)) from e
    if rate != RATE:
        raise ValueError(f"{rate} samples a second; resample it to {RATE}")
    if not len(samples):
        raise ValueError("a sound without a sample")
    if not np.isfinite(samples).all():
        place = np.flatnonzero(~np.isfinite(samples).all(1))[0]
        raise ValueError(f"sample {place} of the waveform is not a finite number")
    return samples.mean(1)


def log_mel(samples: np.ndarray, bins: int, frames: int) -> np.ndarray:
    """fp32 [frames, bins] of a waveform, cut or filled up with silence to so many frames."""
    length = frames * HOP
    samples = np.asarray(samples[:length], np.float64)
    samples = np.pad(samples, (0, length - len(samples)))
    samples = np.pad(samples, WINDOW // 2, mode="reflect")
    first = HOP * np.arange(frames)[:, None]
    windows = samples[first + np.arange(WINDOW)]
    hann = np.hanning(WINDOW + 1)[:-1]
    spectra = np.fft.rfft(windows * hann, axis=1)
    power = np.abs(spectra) ** 2
    bands = power @ mel_bands(bins)
    logs = np.log10(np.maximum(bands, 1e-10))
    logs = np.maximum(logs, logs.max() - 8)
    scaled = (logs + 4) / 4
    return scaled.astype(np.float32)


@functools.cache
def mel_bands(bins: int) -> np.ndarray:
    """float64 [WINDOW / 2 + 1, bins]: triangles of equal area over frequencies up to 8 kHz."""
    top = _LINEAR + np.log(RATE / 2 / 1000) / _STEP
    edges = _frequencies(np.linspace(0, top, bins + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    ramps = edges[None, :] - frequencies[:, None]
    widths = np.diff(edges)
    rising = -ramps[:, :-2] / widths[:-1]
    falling = ramps[:, 2:] / widths[1:]
    heights = np.maximum(0, np.minimum(rising, falling))
    bases = edges[2:] - edges[:-2]
    return heights * 2 / bases


def _frequencies(mels: np.ndarray) -> np.ndarray:
    """The frequencies in Hz of places on Slaney's mel scale."""
    above = 1000 * np.exp(_STEP * (mels - _LINEAR))
    return np.where(mels < _LINEAR, mels * (1000 / _LINEAR), above)
