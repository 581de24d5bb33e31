"""Operations with fast paths, each beside its plain formula; counted random numbers; the choice by device."""
