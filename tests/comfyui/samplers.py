"""ComfyUI's samplers by name. The default tests run one of each kind of calls and noise, the full ones all."""

import pytest

from tests.comfyui.conftest import mostly_full

KINDS = {
    "euler": "deterministic, one call a step",
    "euler_cfg_pp": "reads the unconditional prediction, by an option on the MODEL",
    "euler_ancestral": "adds noise at each step",
    "heun": "of second order, two calls a step",
    "dpmpp_2m": "multistep: remembers the step before",
    "dpmpp_sde": "draws from a Brownian tree",
    "dpmpp_3m_sde_gpu": "draws from a Brownian tree on the latent's device, remembers two steps",
    "seeds_2": "draws more than once a step",
    "dpm_adaptive": "sets its step size by the whole latent",
    "lcm": "has noise of its own at each step",
    "ddim": "inpaints with noise at random",
    "uni_pc": "a class of its own, not of k_diffusion",
}
OTHERS = (
    *("euler_ancestral_cfg_pp", "heunpp2", "exp_heun_2_x0", "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms"),
    *("dpm_fast", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde_gpu", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde"),
    *("dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "ddpm", "ipndm", "ipndm_v"),
    *("deis", "res_multistep", "res_multistep_cfg_pp", "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp"),
    *("gradient_estimation", "gradient_estimation_cfg_pp", "er_sde", "seeds_3", "sa_solver", "sa_solver_pece"),
    "uni_pc_bh2",
)

DEFAULT = ("euler", "euler_cfg_pp", "euler_ancestral", "heun", "dpmpp_sde", "dpm_adaptive")

every_sampler = pytest.mark.parametrize("sampler", mostly_full((*KINDS, *OTHERS), DEFAULT))


def selected(request: pytest.FixtureRequest) -> list[str]:
    """The samplers of the tests of this file that are to run."""
    calls = [
        item.callspec.params for item in request.session.items if item.path == request.path and hasattr(item, "callspec")
    ]
    wanted = {call["sampler"] for call in calls if "sampler" in call}
    return [name for name in (*KINDS, *OTHERS) if name in wanted]
