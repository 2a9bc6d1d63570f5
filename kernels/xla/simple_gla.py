def forward(*a): raise NotImplementedError
def backward(*a): raise NotImplementedError
