"""Which draft suits what comes next (Algorithm 1): context, ranking head, what is observed."""
