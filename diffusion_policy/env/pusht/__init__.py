"""PushT environments under their gymnasium ids."""

from gymnasium.envs.registration import register

register(id="pusht-state-v0", entry_point="diffusion_policy.env.pusht.pusht_env:PushTEnv", max_episode_steps=300)
register(
    id="pusht-keypoints-v0",
    entry_point="diffusion_policy.env.pusht.pusht_keypoints_env:PushTKeypointsEnv",
    max_episode_steps=300,
)
register(
    id="pusht-image-v0", entry_point="diffusion_policy.env.pusht.pusht_image_env:PushTImageEnv", max_episode_steps=300
)
