// What translate.py's entry points pass to a kernel: values that become whatever type its parameter has.
#pragma once

struct emu_pointer {
  uintptr_t address;
  template <class T>
  MSL_UNCHECKED operator T*() const {
    return (T*)address;
  }
};

struct emu_reference {
  uintptr_t address;
  template <class T>
  MSL_UNCHECKED operator T&() const {
    return *(T*)address;
  }
};

struct emu_position {
  const uint* values;
  template <class T>
  MSL_UNCHECKED operator T() const {
    using vector = metal::msl_vector<T>;
    if constexpr (vector::width == 0) {
      return (T)values[0];
    } else {
      T result;
      for (int i = 0; i < vector::width; i++) result[i] = (typename vector::element)values[i];
      return result;
    }
  }
};
