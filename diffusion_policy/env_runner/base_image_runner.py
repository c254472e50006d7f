"""What a workspace expects of the rollouts of an image task."""



class BaseImageRunner:
    def __init__(self, output_dir):
        self.output_dir = output_dir

    def run(self, policy) -> dict:
        """Roll the policy out and return what is to be logged."""
        raise NotImplementedError
