"""Converts 4- and 8-bit numbers to 16-bit ones, four bytes at a time; the compiler would convert them one by one.

Each function has the same result without assembly, for Triton's interpreter.
"""

from __future__ import annotations

from legato.kernels.language import Scalar, constexpr, jit, tl

# A code becomes the lowest bits of the mantissa of 128 + code (bfloat16) or 1024 + code (float16): its byte, and one
# of these above it.
_CODE_PAIRS = """{{
.reg .b32 codes;
and.b32 codes, $4, 0x0f0f0f0f;
prmt.b32 $0, codes, {upper:#x}, 0x4140;
prmt.b32 $1, codes, {upper:#x}, 0x4342;
shr.b32 codes, $4, 4;
and.b32 codes, codes, 0x0f0f0f0f;
prmt.b32 $2, codes, {upper:#x}, 0x4140;
prmt.b32 $3, codes, {upper:#x}, 0x4342;
}}"""
# Sign, exponent and mantissa of fp8 are moved to their places in bfloat16, which gives 2 ** -120 of the number, or in
# float16, which gives 2 ** -8.
_FP8_PAIRS = """{{
.reg .b32 bytes, sign;
prmt.b32 bytes, $2, 0, 0x1404;
and.b32 sign, bytes, 0x80008000;
shr.b32 bytes, bytes, {shift};
lop3.b32 $0, bytes, {mask:#x}, sign, 0xEA;
prmt.b32 bytes, $2, 0, 0x3424;
and.b32 sign, bytes, 0x80008000;
shr.b32 bytes, bytes, {shift};
lop3.b32 $1, bytes, {mask:#x}, sign, 0xEA;
}}"""
BF16_CODES, F16_CODES, FP8_TO_BF16, FP8_TO_F16 = (
    code if tl is None else tl.constexpr(code)
    for code in (
        _CODE_PAIRS.format(upper=0x43),
        _CODE_PAIRS.format(upper=0x64),
        _FP8_PAIRS.format(shift=4, mask=0x07F007F0),
        _FP8_PAIRS.format(shift=1, mask=0x3F803F80),
    )
)


# Two bytes at a time by the device's own conversion, from 8.9 on.
_FP8_WORD = """{
.reg .b16 low, high, a, b, c, d;
.reg .b32 first, second;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 second, high;
mov.b32 {a, b}, first;
mov.b32 {c, d}, second;
cvt.f32.f16 $0, a;
cvt.f32.f16 $1, b;
cvt.f32.f16 $2, c;
cvt.f32.f16 $3, d;
}"""
FP8_WORD = _FP8_WORD if tl is None else tl.constexpr(_FP8_WORD)


@jit
def fp8_numbers(words: Scalar) -> Scalar:
    """Of int32 words: the four numbers of each as float32."""
    return tl.inline_asm_elementwise(
        FP8_WORD,
        "=f,=f,=f,=f,r",
        [words],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@jit
def code_pairs(codes: Scalar, DTYPE: constexpr, ASSEMBLE: constexpr) -> Scalar:
    """Bytes with two codes each -> 128 + code in bfloat16 of the lower and of the upper halves; if that is not the type
    of x, 1024 + code in float16."""
    if ASSEMBLE:
        if tl.bfloat16 == DTYPE:
            pairs = tl.inline_asm_elementwise(
                BF16_CODES, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            pairs = tl.inline_asm_elementwise(
                F16_CODES, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    elif tl.bfloat16 == DTYPE:
        pairs = (
            ((codes & 15).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True),
            ((codes >> 4).to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True),
        )
    else:
        pairs = (
            ((codes & 15).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True),
            ((codes >> 4).to(tl.int16) | 0x6400).to(tl.float16, bitcast=True),
        )
    return pairs


@jit
def converted(numbers: Scalar, FORM: constexpr, DTYPE: constexpr, ASSEMBLE: constexpr) -> Scalar:
    """Numbers of 8 bits in the type of x, exactly. Those of fp8 come as bytes unless x is fp8, too: devices that do not
    multiply fp8 do not know the type at all."""
    if FORM != "fp8" or numbers.dtype != tl.uint8:
        wide = numbers if numbers.dtype == DTYPE else numbers.to(tl.float32 if not ASSEMBLE else DTYPE).to(DTYPE)
    elif not ASSEMBLE:
        bits = numbers.to(tl.int16)
        small = (((bits & 0x7F) << 4) | ((bits & 0x80) << 8)).to(tl.bfloat16, bitcast=True)
        wide = (small.to(tl.float32) * (2.0**120)).to(DTYPE)
    elif tl.bfloat16 == DTYPE:
        small = tl.inline_asm_elementwise(FP8_TO_BF16, "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=True, pack=4)
        wide = small * tl.full((), 2.0**120, tl.bfloat16)
    else:
        small = tl.inline_asm_elementwise(FP8_TO_F16, "=r,=r,r", [numbers], dtype=tl.float16, is_pure=True, pack=4)
        wide = small * tl.full((), 256.0, tl.float16)
    return wide


@jit
def minus(numbers: Scalar, subtrahend: Scalar, ASSEMBLE: constexpr) -> Scalar:
    """In the type of `numbers`, two at a time. The interpreter cannot subtract in bfloat16."""
    if ASSEMBLE:
        difference = numbers - subtrahend.to(numbers.dtype)
    else:
        difference = (numbers.to(tl.float32) - subtrahend).to(numbers.dtype)
    return difference
