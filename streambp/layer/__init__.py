"""The step of one decoder layer: forward without a graph, backward chunk by chunk. `admission/`
decides which calls run in chunks.

B rows, T tokens in chunks of C, H heads of queries, H_kv of keys, "wide" is promote_types(dtype,
float32). A tensor has the shape of the whole sequence, or of a chunk.

    of the caller
        hidden_states      [..., B, T, h]      the layer's input, without its history; a chunk's
                                               part is a view
        arguments          by name             tensors with a dimension of tokens are cut, others
                                               are passed to each chunk whole; a tensor with
                                               requires_grad becomes a leaf of each chunk
                                               (`arguments.py`)
        parameters         in their slots      detached aliases (shadows) replace them while chunks
                                               are differentiated (`recompute.py`)
    passed from chunk to chunk (`chunk_states.py`)
        K, V               [B, T, H_kv, D]     of all tokens so far; in one buffer, or in one tile
                                               for each chunk
        dK, dV             the same, wide      sums over the chunks that read K and V, complete in
                                               the backward of their own chunk
        states             by `StateKey`       of a recurrence or convolution
        upstream           by `StateKey`       the gradients of end states
    kept from forward for backward (`saved_tensors.py`), on the device or on the host
        x                  [..., B, C, h]      a chunk's hidden_states
        attended           [B, C, H, D_v]      attention's output, with its logsumexp [B, H, C] in
                                               float32 or float64
        products           [B, C, out]         outputs of Linears, by `saves`
        start states       by `StateKey`
    made in backward, for one chunk at a time
        the graph          of the recomputed chunk, from leaves of x, arguments, states and shadows
                           to its outputs
        upstream           [..., B, C, h]      the chunk's part of the gradient that came in, a view
    given back
        the output         [..., B, T, h]      and extra outputs, joined from the chunks (`call.py`)
        its input's grad   [..., B, T, h]      written chunk by chunk, into the buffer of the
                                               gradient that came in, if no other code holds that
                                               gradient (`gradients.py`)
        parameters' grads  as parameters       wide sums over chunks, cast to the parameter's dtype
                                               at the end
"""
