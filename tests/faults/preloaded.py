"""What a rank of the tests imports until it has loaded a model and a decoder: nothing here does anything else."""

import diffusers.models.autoencoders.vae
import diffusers.models.transformers.transformer_flux  # noqa: F401

import parallel_backend.adapters
import parallel_backend.probe
import parallel_backend.worker  # noqa: F401
import tests.faults.rank  # noqa: F401
