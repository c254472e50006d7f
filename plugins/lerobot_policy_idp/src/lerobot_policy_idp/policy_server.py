"""LeRobot's asynchronous policy server, for IDP too: python -m lerobot_policy_idp.policy_server --host=... --port=...

LeRobot's own module serves the types of a list and loads no plugins.
"""

from __future__ import annotations

from lerobot.async_inference import constants, policy_server

from lerobot_policy_idp import IDPPolicy

if IDPPolicy.name not in constants.SUPPORTED_POLICIES:
    constants.SUPPORTED_POLICIES.append(IDPPolicy.name)  # the list that the server looks at

if __name__ == "__main__":
    policy_server.serve()
