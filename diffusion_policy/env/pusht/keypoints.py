"""Keypoints of the T block, in its frame."""

import numpy as np

# Upstream draws the T, samples points of its mask far from each other (generator seed 0) and adds jitter. The published
# `keypoint` arrays contain exactly these points, so they are fixed here and do not depend on library versions.
BLOCK_KEYPOINTS = np.array(
    [
        [9.269786713763871, 90.04097352393619],
        [-60.983472364471474, -1.1867297607997276],
        [60.91275557727772, -1.3933642242328201],
        [-0.2705034390160016, 25.54362499146542],
        [-14.064927576212233, 122.81585355412153],
        [39.002738500170146, 32.857404276587566],
        [-39.966414424694534, 32.729655446429945],
        [-16.82434437939744, 62.86317892234989],
        [23.54146122024909, -1.7002881094626152],
    ]
)
