"""Priority functions that tests name by `tests.support.priorities:FUNCTION`."""


def shortest_prompt(request):
    return len(request.prompt_token_ids)


def own_reversed(request):
    return -request.priority


def raises(request):
    raise ValueError(f"it does not like {len(request.prompt_token_ids)} tokens")


def returns_text(request):
    return "high"


def returns_large(request):
    return 1 << 31
