"""Every place where SGLang is touched, as data, one folder per supported SGLang release."""
