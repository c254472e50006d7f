"""Implicit Drifting Policy (IDP): the method of the paper, on a Diffusion Policy code base.

Where the paper is:

    Section 3      Naive Drifting                    policy/naive_drifting.py, drifting.py
    Section 4.1    potential, probe, loss, policy    policy/idp.py
    Section 4.2    conditional expert geometry       geometry.py
    Section 4.3    local geometry excess             geometry.py
    Appendix A.4   the full matrix, ablations        geometry_variants.py
    Tables         the other methods                 policy/, one file per objective

An objective (policy/) trains and samples a generator f(o, a, t) (generator.py), which holds any backbone and encoder.
"""
