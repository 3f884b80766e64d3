// SPDX-License-Identifier: MIT OR Apache-2.0
// A Java program that compares its heap each time it is asked: as `target answers`, which tests/src/programs.rs starts,
// too. Its argument is the folder with the pipe of questions and the file of answers.

import java.io.File;
import java.io.FileOutputStream;
import java.io.RandomAccessFile;
import java.util.Arrays;
import java.util.Random;

class Answers {
    static final int ARRAYS = 256;

    static byte[] bytes(int seed) {
        byte[] bytes = new byte[1 << 16];
        new Random(seed).nextBytes(bytes);
        return bytes;
    }

    public static void main(String[] arguments) throws Exception {
        byte[][] heap = new byte[ARRAYS][];
        for (int number = 0; number < ARRAYS; number++) {
            heap[number] = bytes(number);
        }
        RandomAccessFile asks = new RandomAccessFile(arguments[0] + "/asks", "rw");
        FileOutputStream answers = new FileOutputStream(arguments[0] + "/answers", true);
        new File(arguments[0] + "/ready").createNewFile();
        while (true) {
            asks.readByte();
            boolean isRight = true;
            for (int number = 0; number < ARRAYS; number++) {
                isRight &= Arrays.equals(heap[number], bytes(number));
            }
            answers.write((isRight ? "OK\n" : "BAD\n").getBytes());
        }
    }
}
