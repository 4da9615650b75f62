"""Sources that Metal's compiler refuses, or is likely to, are refused here too, with file and line
and reason.
"""

import re
import sys

import pytest

from metal_ops.emulated_metal import MetalCompileError, compile

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="emulated on Linux; a Mac has the real METAL"
)

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
SIGNATURE = """kernel void f(
    device float* out, device const float* x, constant int& n, uint t [[thread_position_in_grid]])"""


def kernel(body, before=""):
    return f"{HEAD}{before}{SIGNATURE} {{\n{body}}}\n"


def parameters(*more):
    """A kernel with these parameters."""
    return f"{HEAD}kernel void f({', '.join(more)}) {{ // here\n}}\n"


OUT, T = "device float* out", "uint t [[thread_position_in_grid]]"

# Found by clang, with real address spaces and only what Metal's library has.
STRICT = {
    "threadgroup pointer for a device pointer": (
        kernel(
            """
    threadgroup float shared[32];
    shared[t] = 0;
    out[t] = first(shared); // here
""",
            """
float first(device float* a) { return a[0]; }
""",
        ),
        "no matching function for call to 'first'",
    ),
    "constant pointer for a device pointer": (
        kernel("""
    device const int* p = &n; // here
    out[t] = x[t];
"""),
        "cannot initialize a variable of type 'const device int|cannot initialize a variable of type",
    ),
    "local pointer without address space": (
        kernel("""
    const float* p = x; // here
    out[t] = p[t];
"""),
        "cannot initialize a variable of type 'const float \\*'",
    ),
    "write to constant memory": (
        parameters("constant float* out", T).replace("// here\n", "\nout[t] = 0; // here\n"),
        "read-only variable is not assignable|cannot assign to",
    ),
    "max of float and half": (
        kernel("""
    half h = 1.0h;
    out[t] = max(x[t], h); // here
"""),
        "call to 'max' is ambiguous",
    ),
    "max of int and uint": (
        kernel("""
    out[t] = max(n, t); // here
"""),
        "call to 'max' is ambiguous",
    ),
    "exp of bfloat": (
        kernel("""
    bfloat b = bfloat(1.0f);
    out[t] = float(exp(b)); // here
"""),
        "call to deleted function 'exp'",
    ),
    "max of bfloat": (
        kernel("""
    bfloat b = bfloat(1.0f);
    out[t] = float(max(b, b)); // here
"""),
        "call to deleted function 'max'",
    ),
    "simd_sum of bfloat": (
        kernel("""
    bfloat b = bfloat(1.0f);
    out[t] = float(simd_sum(b)); // here
"""),
        "not defined for this type",
    ),
    "simd_sum of 64 bits": (
        kernel("""
    out[t] = float(simd_sum(ulong(t))); // here
"""),
        "not defined for this type",
    ),
    "a constant index beyond an array": (
        kernel("""
    float a[2] = {0, 0};
    out[t] = a[2]; // here
"""),
        "past the end",
    ),
    "a variable used before it is set": (
        kernel("""
    float v;
    out[t] = v; // here
"""),
        "uninitialized",
    ),
    "erf, which Metal lacks": (
        kernel("""
    out[t] = erf(x[t]); // here
"""),
        "undeclared identifier 'erf'",
    ),
    "float2 into float4": (
        kernel("""
    float4 v = float4(x[t], n); // here
    out[t] = v.x;
"""),
        "wrong number of components",
    ),
    "float4 into half4": (
        kernel("""
    half4 v = float4(0.0f); // here
    out[t] = v.x;
"""),
        "cannot initialize a variable",
    ),
    "float4 into int4": (
        kernel("""
    int4 v = float4(0.0f); // here
    out[t] = v.x;
"""),
        "cannot initialize a variable",
    ),
    "a matrix of another size": (
        kernel("""
    simdgroup_matrix<float, 16, 16> m; // here
    out[t] = x[t];
"""),
        "only simdgroup matrices of 8 x 8 exist",
    ),
    "a lane's elements of a matrix as a whole": (
        kernel("""
    simdgroup_matrix<float, 8, 8> m;
    m.thread_elements() = float2(x[t]); // here
    out[t] = m.thread_elements()[0];
"""),
        "array type .* is not assignable",
    ),
    "a whole struct out of device memory": (
        kernel(
            """
    Pair p = ((device const Pair*)x)[t]; // here
    out[t] = p.a;
""",
            """
struct Pair {
  float a, b;
};
""",
        ),
        "no matching constructor for initialization of 'Pair'",
    ),
    "a whole struct assigned to device memory": (
        kernel(
            """
    Pair p;
    p.a = p.b = 0;
    *(device Pair*)out = p; // here
""",
            """
struct Pair {
  float a, b;
};
""",
        ),
        "no viable overloaded '='|no matching",
    ),
    "an array of variable length": (
        kernel("""
    float a[n]; // here
    a[0] = 1;
    out[t] = a[0];
"""),
        "variable length array",
    ),
    "if constexpr, which is C++17": (
        kernel("""
    if constexpr (sizeof(float) == 4) out[t] = 0; // here
"""),
        "C\\+\\+17 extension",
    ),
    "an order of atomics that Metal lacks": (
        kernel("""
    atomic_fetch_add_explicit((device atomic_int*)out, 1, memory_order_seq_cst); // here
"""),
        "undeclared identifier 'memory_order_seq_cst'",
    ),
    "a function without a result": (
        kernel(
            """
    out[t] = x[t];
""",
            """
float g(float x) {
  x += 1;
} // here
""",
        ),
        "non-void function",
    ),
    "a name that is not declared": (
        kernel("""
    out[t] = y[t]; // here
"""),
        "undeclared identifier 'y'",
    ),
}

# Found in the kernel's signature.
SIGNATURES = {
    "pointer without address space": (parameters("float* out", T), "out needs an address space"),
    "32 buffers": (parameters(*[f"device float* b{i}" for i in range(32)]), "more than 31 buffers"),
    "a buffer of number 31": (
        parameters("device float* out [[buffer(31)]]"),
        "more than 31 buffers",
    ),
    "two buffers of one number": (
        parameters("device float* a [[buffer(1)]]", "device float* b [[buffer(1)]]"),
        "two parameters have the same buffer index",
    ),
    "an unknown attribute": (
        parameters(OUT, "uint t [[thread_position_in_grd]]"),
        "[[thread_position_in_grd]] is not supported",
    ),
    "a value": (parameters(OUT, "int n"), "n is neither a pointer, a reference nor a position"),
    "threadgroup memory as an argument": (
        parameters(OUT, "threadgroup float* shared [[threadgroup(0)]]"),
        "shared: declare threadgroup memory inside the kernel",
    ),
    "threadgroup variable with a value": (
        kernel("    threadgroup float shared = 0;\n").replace(
            "kernel void f(", "kernel void f( // here"
        ),
        "threadgroup variable shared cannot have a value at first",
    ),
    "an instance of no kernel": (
        kernel("out[t] = x[t];\n")
        + 'template [[host_name("g")]] [[kernel]] decltype(h<float>) h<float>; // here\n',
        "g is an instance of h, which is no kernel template",
    ),
    "an include": (
        '#include "other.h" // here\n' + kernel("out[t] = x[t];\n"),
        "a kernel's source is one text",
    ),
}

LINT = {
    "double": (
        kernel("""
    out[t] = double(x[t]); // here
"""),
        "Metal has no double",
    ),
    "lambda": (
        kernel("""
    auto twice = [](float v) { return 2 * v; }; // here
    out[t] = twice(x[t]);
"""),
        "lambdas",
    ),
    "lambda as an argument": (
        kernel(
            """
    out[t] = apply([=](float v) { return v * n; }, x[t]); // here
""",
            """
template <typename F> float apply(F f, float v) { return f(v); }
""",
        ),
        "lambdas",
    ),
    "recursion": (
        kernel(
            """
    out[t] = power(x[t], n);
""",
            """
float power(float v, int n) { // here
  return n ? v * power(v, n - 1) : 1;
}
""",
        ),
        "recursion: power calls power",
    ),
    "recursion of two": (
        kernel(
            """
    out[t] = even(n);
""",
            """
int odd(int n);
int even(int n) { // here
  return n == 0 ? 1 : odd(n - 1);
}
int odd(int n) {
  return n == 0 ? 0 : even(n - 1);
}
""",
        ),
        "recursion: even calls odd calls even",
    ),
    "function pointer": (
        kernel(
            """
    float (*g)(float) = twice; // here
    out[t] = g(x[t]);
""",
            """
float twice(float v) { return 2 * v; }
""",
        ),
        "function pointer g",
    ),
    "function as an argument": (
        kernel(
            """
    out[t] = apply(twice, x[t]); // here
""",
            """
float twice(float v) { return 2 * v; }
template <typename F> float apply(F f, float v) { return f(v); }
""",
        ),
        "function twice used as a value",
    ),
    "static local": (
        kernel("""
    static int calls = 0; // here
    out[t] = x[t];
"""),
        "a static local variable",
    ),
    "static member": (
        kernel(
            """
    out[t] = x[t];
""",
            """
struct Tile {
  static constexpr int size = 8; // here
};
""",
        ),
        "a static member that is not in the constant address space",
    ),
    "variable of the file scope": (
        kernel(
            """
    out[t] = x[t];
""",
            """
constexpr int SIZE = 4; // here
""",
        ),
        "SIZE of the file scope is not in the constant",
    ),
    "overloads by address space": (
        kernel(
            """
    out[t] = x[t];
""",
            """
float first(device const float* a) { return a[0]; }
float first(threadgroup const float* a) { return a[0]; } // here
""",
        ),
        "first is overloaded by address space alone",
    ),
    "threadgroup variable in a function": (
        kernel(
            """
    out[t] = x[t];
""",
            """
float g() {
  threadgroup float shared[4]; // here
  return shared[0];
}
""",
        ),
        "a threadgroup variable in a function that is no kernel",
    ),
    "threadgroup variable in a block": (
        kernel("""
    if (t > 2) {
      threadgroup float shared[4]; // here
      shared[0] = 1;
    }
    out[t] = x[t];
"""),
        "a threadgroup variable in an inner block",
    ),
    "std": (
        kernel("""
    out[t] = std::max(x[t], 1.0f); // here
"""),
        "Metal has no std::",
    ),
    "throw": (
        kernel("""
    if (n < 0) throw n; // here
    out[t] = x[t];
"""),
        "Metal has no exceptions",
    ),
    "new": (
        kernel("""
    int* p = new int; // here
    out[t] = x[t];
"""),
        "Metal has no new",
    ),
    "delete": (
        kernel("""
    int* p = 0;
    delete p; // here
    out[t] = x[t];
"""),
        "Metal has no delete",
    ),
    "virtual": (
        kernel(
            """
    out[t] = x[t];
""",
            """
struct Op {
  virtual float f(float v) { return v; } // here
};
""",
        ),
        "Metal has no virtual",
    ),
    "goto": (
        kernel("""
    goto end; // here
end:
    out[t] = x[t];
"""),
        "Metal has no goto",
    ),
    "long long": (
        kernel("""
    long long v = n; // here
    out[t] = v;
"""),
        "long long",
    ),
    "printf": (
        kernel("""
    printf("%d", n); // here
    out[t] = x[t];
"""),
        "no printf",
    ),
    "a word that Metal keeps": (
        kernel("""
    float fragment = x[t]; // here
    out[t] = fragment;
"""),
        "a keyword of Metal",
    ),
    "a word hidden in a macro": (
        kernel(
            """
    out[t] = TWICE(x[t]); // here
""",
            """
#define TWICE(v) (float)((double)(v) * 2)
""",
        ),
        "Metal has no double",
    ),
}


@pytest.mark.parametrize("fault", [*STRICT, *SIGNATURES, *LINT])
def test_refused(fault):
    source, message = {**STRICT, **SIGNATURES, **LINT}[fault]
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "// here" in text)
    with pytest.raises(MetalCompileError) as raised:
        compile(source)
    pattern = message if fault in STRICT else re.escape(message)
    named = [
        text for text in str(raised.value).splitlines() if text.startswith(f"kernel.metal:{line}:")
    ]
    assert any(re.search(pattern, text) for text in named), raised.value


ALLOWED = {
    "an index in an index, and an array of them": """
    int at[2] = {0, 1};
    out[at[at[0]]] = x[at[1]];
""",
    "a local with a function's name": """
    float twice = 2 * x[t];
    out[t] = twice;
""",
    "a name that contains a refused one": """
    float new_value = x[t];
    out[t] = new_value;
""",
    "threadgroup pointers in blocks": """
    threadgroup float shared[32];
    if (n) {
      threadgroup float* p = shared;
      p[t] = x[t];
    }
""",
    "a ternary over an array": """
    int at[2] = {0, 1};
    out[t] = n > 1 ? at[0] : at[1];
""",
    "fields copied one by one": """
    device const Pair* p = (device const Pair*)x;
    out[t] = p[t].a;
""",
    "constants of the file scope": """
    out[t] = SIZES[n] + TABLE_SIZE;
""",
    "overloads by type": """
    out[t] = widen(x[t]) + widen(half(1.0h));
""",
}
BEFORE = """struct Pair {
  float a, b;
};
float twice(float v) { return 2 * v; }
float widen(float v) { return v; }
float widen(half v) { return float(v); }
constant int TABLE_SIZE = 2;
constant float SIZES[TABLE_SIZE] = {1, 2};
"""


@pytest.mark.parametrize("what", ALLOWED)
def test_allowed(what):
    assert list(compile(kernel(ALLOWED[what], BEFORE))) == ["f"]


def test_all_that_is_refused_is_listed():
    source = kernel("    static int a = 0;\n    goto end;\nend:\n    out[t] = double(a);\n")
    with pytest.raises(MetalCompileError) as raised:
        compile(source)
    places = [text.split(": ")[0] for text in str(raised.value).splitlines()]
    assert places == ["kernel.metal:5", "kernel.metal:6", "kernel.metal:8"]


def test_lines_after_macros_and_comments_are_those_of_the_source():
    body = "/* one\n two */ out[t] = TWICE(\n x[t]);\n out[t] = y; // here\n"
    source = kernel(body, "#define TWICE(v) (2 * (v))\n\n\n")
    line = next(number for number, text in enumerate(source.splitlines(), 1) if "// here" in text)
    with pytest.raises(MetalCompileError, match=f"rows.metal:{line}:.*undeclared identifier 'y'"):
        compile(source, "rows.metal")


def test_source_without_a_kernel():
    with pytest.raises(MetalCompileError, match="kernel.metal: no kernel in the source"):
        compile(HEAD + "float twice(float v) { return 2 * v; }\n")


def test_without_strict_only_the_build_refuses():
    source = kernel("    static const int two = 2;\n    out[t] = x[t] * two;\n")
    compile(source, strict=False)
    with pytest.raises(MetalCompileError, match="a static local variable"):
        compile(source)
