def run_dropless(*a):
    raise NotImplementedError


def multiply_groups(*a):
    raise NotImplementedError
