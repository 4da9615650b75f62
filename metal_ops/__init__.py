"""The ops of a round: contract, reference, choice of kernel, public function. Knows nothing of
models or requests.
"""
