def run_self_check(bundle, source, drafts, mode):
    return {"mode": mode}
